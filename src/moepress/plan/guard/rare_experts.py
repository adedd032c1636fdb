from dataclasses import dataclass

import torch

from moepress.errors import MoepressError
from moepress.plan.facts import LayerFacts
from moepress.plan.guard.base import GUARDS, Guard
from moepress.plan.guard.super_experts import beyond


@GUARDS.register("rare-experts")
@dataclass(frozen=True)
class RareExperts(Guard):
    """Keeps experts as they are that little of the text needs, but that text much: seldom chosen, and then adding far
    more than is usual in their layer. Means over all text hardly see them."""

    times: float = 3.0
    """How many times the median of the layer's experts is far more."""
    share: float = 0.5
    """Seldom is less than so much of an equal share of the choices."""
    tokens: int = 128
    """Experts that fewer tokens chose are not judged."""

    needs = ("output-norm",)

    def __post_init__(self) -> None:
        if not self.times > 1:
            raise MoepressError(f"rare-experts: times must be above 1, not {self.times}")

    def alone(self, facts: LayerFacts) -> frozenset[int]:
        return frozenset(self.ranked(facts))

    def ranked(self, facts: LayerFacts) -> list[int]:
        """The same, those that add most first."""
        sums = facts.statistics["output-norm"]
        routed_E, judged_E = sums["routed"], sums["routed"] >= self.tokens
        if not judged_E.any():
            return []
        added_E = torch.where(judged_E, sums["gated"] / routed_E.clamp_min(1), 0.0)
        rare_E = routed_E < self.share * routed_E.mean()
        return beyond(torch.where(rare_E, added_E, 0.0), self.times * float(added_E[judged_E].median()))
