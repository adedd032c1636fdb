"""Take experts away while a model trains."""

from moepress.prune.progressive import ProgressivePruning

__all__ = ["ProgressivePruning"]
