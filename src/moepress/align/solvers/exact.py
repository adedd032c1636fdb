from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moepress.align.solvers.base import SOLVERS, Solution, Solver


@SOLVERS.register("scipy")
@dataclass(frozen=True)
class Exact(Solver):
    """SciPy's shortest augmenting paths: exact, on one core. The reference for every other solver."""

    def solve(self, cost_FF: Tensor) -> Solution:
        _, order = linear_sum_assignment(cost_FF.detach().cpu().numpy(), maximize=True)
        return Solution(torch.from_numpy(order).long(), gap=0.0)
