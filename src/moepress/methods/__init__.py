"""Whole methods by name: which component stands at which place of a recipe. One method a file."""

from moepress.methods import auto, baselines, hc_smoe, m_smoe, merge_moe, prune_refit, pruning, ream  # noqa: F401 - registration
from moepress.methods.base import METHODS, Method

__all__ = ["METHODS", "Method"]
