from dataclasses import dataclass

from torch import Tensor

from moepress.errors import MoepressError
from moepress.plan.budget.base import BUDGETS, Budget, Limits, check_average


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
        counts = [limit.least for limit in limits]
        rest: list[tuple[float, int, int]] = []
        for layer, (score_E, limit) in enumerate(zip(scores, limits, strict=True)):
            share_E = score_E.double() / score_E.double().sum().clamp_min(1e-300)
            ranked = sorted(share_E.tolist(), reverse=True)
            ranked[0] = 1.0
            rest += [(-share, layer, rank) for rank, share in enumerate(ranked[: limit.most]) if rank >= limit.least]
        free = int(average * len(limits) + 1e-9) - sum(counts)  # downwards: a size that was asked for is not exceeded
        for _, layer, _ in sorted(rest)[:free]:
            counts[layer] += 1
        return counts
