"""Methods side by side on one model, under equal conditions."""

from moepress.comparison.run import Comparing, compare_methods

__all__ = ["Comparing", "compare_methods"]
