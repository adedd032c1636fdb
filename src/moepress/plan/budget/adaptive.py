from dataclasses import dataclass

from torch import Tensor

from moepress.errors import MoepressError
from moepress.plan.budget.base import BUDGETS, Budget, Limits, check_average
from moepress.plan.budget.overall import share_out


@BUDGETS.register("adaptive")
@dataclass(frozen=True)
class Adaptive(Budget):
    """More experts in layers that use more: scores are normalised within the layer, each layer's best is set to 1,
    and the best of all layers together are kept. The total is exact; ties go to the earlier layer and expert."""

    paper = "MC-SMoE, https://arxiv.org/abs/2310.01334"

    def counts(self, scores: list[Tensor], average: float, limits: list[Limits]) -> list[int]:
        check_average(average, limits)
        if any(limit.step > 1 for limit in limits):
            raise MoepressError("an adaptive budget cannot keep to multiples; use plan.budget=uniform")
        shares = []
        for score_E in scores:
            share_E = score_E.double() / score_E.double().sum().clamp_min(1e-300)
            shares.append([1.0, *sorted(share_E.tolist(), reverse=True)[1:]])
        return share_out(shares, average, limits)
