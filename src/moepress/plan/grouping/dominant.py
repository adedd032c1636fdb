from dataclasses import dataclass

from torch import Tensor

from moepress.plan.grouping.base import GROUPINGS, Grouping


@GROUPINGS.register("dominant")
@dataclass(frozen=True)
class Dominant(Grouping):
    """Every expert joins the dominant expert that is most similar to it; dominant experts lead a group each."""

    paper = "MC-SMoE, https://arxiv.org/abs/2310.01334"

    def groups(
        self, score_E: Tensor, similarity_EE: Tensor, leaders: list[int], router_groups: int = 1
    ) -> list[list[int]]:
        groups = {leader: [leader] for leader in leaders}
        for expert in range(len(score_E)):
            if expert not in groups:
                nearest = int(similarity_EE[expert, leaders].argmax())
                groups[leaders[nearest]].append(expert)
        return [groups[leader] for leader in leaders]
