"""Linear assignment: one unit of one expert for each unit of the other. One solver a file, each with a proof."""

from moepress.align.solvers import auction, auto, exact  # noqa: F401 - registration
from moepress.align.solvers.base import SOLVERS, Solution, Solver, certified_gap

__all__ = ["SOLVERS", "Solution", "Solver", "certified_gap"]
