from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moepress.align.solvers.base import SOLVERS, Solution, Solver, checked, in_threads, not_finite


@SOLVERS.register("scipy")
@dataclass(frozen=True)
class Exact(Solver):
    """SciPy's shortest augmenting paths: exact, one core a problem. The reference for every other solver."""

    paper = "Crouse, https://doi.org/10.1109/TAES.2016.140952"

    def solve_many(self, costs_NFF: Tensor, norms_NF: Tensor | None = None) -> list[Solution]:
        costs_NFF = checked(costs_NFF)
        return [Solution(order, 0.0) for order in best_orders(costs_NFF, range(len(costs_NFF)))]


def best_orders(costs_NFF: Tensor, which: range | list[int], prices_nF: Tensor | None = None) -> list[Tensor]:
    """The best assignment of some of the problems. Prices of columns change no answer, only the time it takes."""

    def best(place: int) -> Tensor:
        cost_FF = costs_NFF[which[place]].cpu().double()
        if prices_nF is not None:
            cost_FF = cost_FF - prices_nF[place].cpu().double()
        # SciPy finds NaN, but takes an infinity for an edge that is not there.
        if not bool(torch.isfinite(torch.stack(cost_FF.aminmax())).all()):
            raise not_finite()
        return torch.from_numpy(linear_sum_assignment(cost_FF.numpy(), maximize=True)[1]).long().to(costs_NFF.device)

    return in_threads(best, range(len(which)))
