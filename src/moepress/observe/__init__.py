"""Statistics of a model's routing and experts over calibration text."""

from moepress.observe import (  # noqa: F401 - registration
    features,
    gated_output,
    mean_output,
    output_norm,
    output_peak,
    router_gram,
    usage,
)
from moepress.observe.statistic import STATISTICS, LayerShape, Statistic
from moepress.observe.statistics import Statistics

__all__ = ["STATISTICS", "LayerShape", "Statistic", "Statistics"]
