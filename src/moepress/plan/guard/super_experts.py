from dataclasses import dataclass

import torch

from moepress.errors import MoepressError
from moepress.observe.output_peak import peaks
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
    needs = ("output-peak",)

    def __post_init__(self) -> None:
        if not self.times > 1:
            raise MoepressError(f"super-experts: times must be above 1, not {self.times}")

    def alone(self, facts: LayerFacts) -> frozenset[int]:
        peak_E = peaks(facts.statistics["output-peak"])
        used_E = peak_E[peak_E > 0]
        if not len(used_E):
            return frozenset()
        return frozenset(torch.where(peak_E > self.times * used_E.median())[0].tolist())
