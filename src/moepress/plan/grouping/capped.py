from dataclasses import dataclass

from torch import Tensor

from moepress.errors import MoepressError
from moepress.plan.grouping.base import GROUPINGS, Grouping


@GROUPINGS.register("capped")
@dataclass(frozen=True)
class Capped(Grouping):
    """From the most important expert down, each leader takes those that are most similar to it of all that are still
    free, until its group is full. A few groups take everybody in, and most leaders stay as they are."""

    size: int = 16
    """Experts of a group, its leader included."""

    paper = "REAM, https://arxiv.org/abs/2604.04356"

    def __post_init__(self) -> None:
        if self.size < 2:
            raise MoepressError(f"capped: a group of {self.size} merges nothing; size must be at least 2")

    def least(self, experts: int) -> int:
        return -(-experts // self.size)

    def groups(
        self, score_E: Tensor, similarity_EE: Tensor, leaders: list[int], router_groups: int = 1
    ) -> list[list[int]]:
        score, groups = score_E.tolist(), {leader: [leader] for leader in leaders}
        free = [expert for expert in range(len(score)) if expert not in groups]
        for leader in sorted(leaders, key=lambda e: (-score[e], e)):
            nearest = sorted(free, key=lambda e: (-float(similarity_EE[leader, e]), e))[: self.size - 1]
            groups[leader] += nearest
            free = [expert for expert in free if expert not in nearest]
        return [groups[leader] for leader in leaders]
