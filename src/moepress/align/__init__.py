"""Reorder the hidden units of experts so that units that do the same stand at the same place."""

from moepress.align import (  # noqa: F401 - registration
    activation_matching,
    activation_weight_matching,
    no_alignment,
    weight_matching,
)
from moepress.align.base import ALIGNMENTS, MEMORY, Alignment, Pair, align_bank, align_group, kinds, match
from moepress.align.solvers import SOLVERS, Solution, Solver

__all__ = [
    "ALIGNMENTS",
    "MEMORY",
    "SOLVERS",
    "Alignment",
    "Pair",
    "Solution",
    "Solver",
    "align_bank",
    "align_group",
    "kinds",
    "match",
]
