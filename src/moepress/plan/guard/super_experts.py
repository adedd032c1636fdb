from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.errors import MoepressError
from moepress.observe.output_norm import peaks
from moepress.plan.facts import LayerFacts
from moepress.plan.guard.base import GUARDS, Guard


@GUARDS.register("super-experts")
@dataclass(frozen=True)
class SuperExperts(Guard):
    """Keeps experts as they are whose largest output is far beyond what is usual in their layer: a few such experts
    make the massive activations that attention relies on, and a model falls apart without them."""

    times: float = 10.0
    """How many times the median of the layer's experts is far beyond."""

    paper = "REAP, https://arxiv.org/abs/2510.13999, after https://arxiv.org/abs/2507.23279"
    needs = ("output-norm",)

    def __post_init__(self) -> None:
        if not self.times > 1:
            raise MoepressError(f"super-experts: times must be above 1, not {self.times}")

    def alone(self, facts: LayerFacts) -> frozenset[int]:
        return frozenset(self.ranked(facts))

    def ranked(self, facts: LayerFacts) -> list[int]:
        """The same, the farthest first."""
        peak_E = peaks(facts.statistics["output-norm"])
        used_E = peak_E[peak_E > 0]
        if not len(used_E):
            return []
        return beyond(peak_E, self.times * float(used_E.median()))


def beyond(value_E: Tensor, limit: float) -> list[int]:
    """Experts above a limit, the highest first."""
    return [e for e in torch.argsort(value_E, descending=True, stable=True).tolist() if value_E[e] > limit]
