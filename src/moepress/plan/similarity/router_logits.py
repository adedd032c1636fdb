from dataclasses import dataclass

from torch import Tensor

from moepress.plan.facts import LayerFacts, cosine
from moepress.plan.similarity.base import SIMILARITIES, Similarity


@SIMILARITIES.register("router-logits")
@dataclass(frozen=True)
class RouterLogits(Similarity):
    """Cosine of two experts' router logits over all calibration tokens: experts are alike if the router treats
    them alike."""

    paper = "MC-SMoE, https://arxiv.org/abs/2310.01334"
    needs = ("router-gram",)

    def matrix(self, facts: LayerFacts) -> Tensor:
        return cosine(facts.statistics["router-gram"]["gram"])
