from dataclasses import dataclass

from torch import Tensor

from moepress.plan.facts import LayerFacts
from moepress.plan.saliency.base import SALIENCIES, Saliency


@SALIENCIES.register("frequency")
@dataclass(frozen=True)
class Frequency(Saliency):
    """The share of routing decisions that chose the expert. The more an expert is used, the more it matters."""

    paper = "MC-SMoE, https://arxiv.org/abs/2310.01334"
    needs = ("usage",)

    def score(self, facts: LayerFacts) -> Tensor:
        count_E = facts.statistics["usage"]["count"]
        return count_E / count_E.sum().clamp_min(1)
