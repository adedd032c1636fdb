"""Make one expert out of a group. One operator a file."""

from moepress.merge import average  # noqa: F401 - registration
from moepress.merge.base import MERGES, Merge
from moepress.merge.layer import MergedLayer, merge_layer
from moepress.merge.router import router_rows

__all__ = ["MERGES", "Merge", "MergedLayer", "merge_layer", "router_rows"]
