"""How much each expert matters. One method a file."""

from moepress.plan.saliency import elimination, frequency, output_norm, progressive, random  # noqa: F401 - registration
from moepress.plan.saliency.base import SALIENCIES, Saliency

__all__ = ["SALIENCIES", "Saliency"]
