"""Make what is left of a layer take over the work of what was removed. One method a file."""

from moepress.refit import least_squares, nothing  # noqa: F401 - registration
from moepress.refit.base import REFITS, Refit

__all__ = ["REFITS", "Refit"]
