"""Whole methods by name: which component stands at which place of a recipe. One method a file."""

from moepress.methods import (  # noqa: F401 - registration
    auto,
    baselines,
    hc_smoe,
    m_smoe,
    mc_smoe,
    merge_moe,
    prune_refit,
    pruning,
    ream,
)
from moepress.methods.base import METHODS, Method

__all__ = ["METHODS", "Method"]
