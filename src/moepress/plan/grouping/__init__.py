"""Which expert joins which group. One method a file."""

from moepress.plan.grouping import capped, dominant, hierarchical, prune  # noqa: F401 - registration
from moepress.plan.grouping.base import GROUPINGS, Grouping, strongest

__all__ = ["GROUPINGS", "Grouping", "strongest"]
