"""Statistics of a model's routing and experts over calibration text."""

from moepress.observe import features, output_norm, router_gram, usage  # noqa: F401 - registration
from moepress.observe.statistic import STATISTICS, LayerShape, Statistic
from moepress.observe.statistics import Statistics

__all__ = ["STATISTICS", "LayerShape", "Statistic", "Statistics"]
