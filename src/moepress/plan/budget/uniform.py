from dataclasses import dataclass

from torch import Tensor

from moepress.errors import MoepressError
from moepress.plan.budget.base import BUDGETS, Budget, Limits, check_average


@BUDGETS.register("uniform")
@dataclass(frozen=True)
class Uniform(Budget):
    """The same number of experts in every layer."""

    one_count = True

    def counts(self, scores: list[Tensor], average: float, limits: list[Limits]) -> list[int]:
        check_average(average, limits)
        step = max(limit.step for limit in limits)
        least, most = max(limit.least for limit in limits), min(limit.most for limit in limits)
        count = int(average / step + 1e-9) * step  # downwards: a size that was asked for is not exceeded
        if count < least:
            count = -(-least // step) * step
        if count > most:
            raise MoepressError(f"no multiple of {step} lies between {least} and the {most} experts that a layer has")
        return [count] * len(limits)
