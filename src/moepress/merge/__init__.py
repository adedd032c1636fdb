"""Make one expert out of a group. One operator a file."""

from moepress.merge import average, fisher, repair, zipit  # noqa: F401 - registration
from moepress.merge.base import MERGES, Members, Merge
from moepress.merge.install import install
from moepress.merge.layer import Evidence, MergedLayer, merge_layer
from moepress.merge.router import router_rows

__all__ = ["MERGES", "Evidence", "Members", "Merge", "MergedLayer", "install", "merge_layer", "router_rows"]
