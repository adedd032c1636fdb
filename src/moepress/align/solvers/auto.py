from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moepress.align.solvers.auction import Auction
from moepress.align.solvers.base import SOLVERS, Solution, Solver, checked
from moepress.align.solvers.exact import Exact

TINY = 64
"""Hidden units up to which SciPy is done before an auction has started."""


@SOLVERS.register("auto")
@dataclass(frozen=True)
class Auto(Solver):
    """SciPy for experts of up to 64 hidden units, the auction for all others."""

    gap: float = 1e-4
    """The largest certified gap that is accepted without polishing by the exact solver; 0 makes every answer exact."""

    def solve_many(self, costs_NFF: Tensor, norms_NF: Tensor | None = None) -> list[Solution]:
        tiny = checked(costs_NFF).shape[1] <= TINY
        return (Exact() if tiny else Auction(self.gap)).solve_many(costs_NFF, norms_NF)
