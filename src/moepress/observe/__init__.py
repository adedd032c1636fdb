"""Statistics of a model's routing and experts over calibration text."""

from moepress.observe import (  # noqa: F401 - registration
    features,
    gated_output,
    gradient_gram,
    mean_output,
    output_norm,
    router_gram,
    usage,
)
from moepress.observe.gradients import Fisher, check_differentiable, from_gradients, gather_gradients
from moepress.observe.statistic import STATISTICS, LayerShape, Statistic
from moepress.observe.statistics import Statistics

__all__ = [
    "STATISTICS",
    "Fisher",
    "LayerShape",
    "Statistic",
    "Statistics",
    "check_differentiable",
    "from_gradients",
    "gather_gradients",
]
