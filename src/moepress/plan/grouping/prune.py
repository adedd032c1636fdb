from dataclasses import dataclass

from torch import Tensor

from moepress.plan.grouping.base import GROUPINGS, Grouping


@GROUPINGS.register("prune")
@dataclass(frozen=True)
class Prune(Grouping):
    """Nobody joins anybody: the experts that matter least are dropped, with their rows of the router."""

    drops = True

    def groups(
        self, score_E: Tensor, similarity_EE: Tensor, leaders: list[int], router_groups: int = 1
    ) -> list[list[int]]:
        return [[leader] for leader in leaders]
