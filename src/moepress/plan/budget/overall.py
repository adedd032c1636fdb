from dataclasses import dataclass

from torch import Tensor

from moepress.errors import MoepressError
from moepress.plan.budget.base import BUDGETS, Budget, Limits, check_average


@BUDGETS.register("overall")
@dataclass(frozen=True)
class Overall(Budget):
    """The experts with the highest scores of all layers together, for scores that mean the same in every layer, such
    as those of `elimination`. The total is exact; ties go to the earlier layer."""

    def counts(self, scores: list[Tensor], average: float, limits: list[Limits]) -> list[int]:
        check_average(average, limits)
        if any(limit.step > 1 for limit in limits):
            raise MoepressError("an overall budget cannot keep to multiples; use plan.budget=uniform")
        return share_out([score_E.double().tolist() for score_E in scores], average, limits)


def share_out(scores: list[list[float]], average: float, limits: list[Limits]) -> list[int]:
    """Each layer its least, and what is left to the highest scores of all layers."""
    counts = [limit.least for limit in limits]
    rest: list[tuple[float, int, int]] = []
    for layer, (score_E, limit) in enumerate(zip(scores, limits, strict=True)):
        ranked = sorted(score_E, reverse=True)
        rest += [(-score, layer, rank) for rank, score in enumerate(ranked[: limit.most]) if rank >= limit.least]
    free = int(average * len(limits) + 1e-9) - sum(counts)  # downwards: a size that was asked for is not exceeded
    for _, layer, _ in sorted(rest)[:free]:
        counts[layer] += 1
    return counts
