from dataclasses import dataclass

from torch import Tensor

from moepress.plan.facts import LayerFacts, cosine
from moepress.plan.similarity.base import SIMILARITIES, Similarity


@SIMILARITIES.register("router-weight")
@dataclass(frozen=True)
class RouterWeight(Similarity):
    """Cosine of two experts' rows of the router's weight. Needs no calibration."""

    paper = "MC-SMoE, https://arxiv.org/abs/2310.01334"

    def matrix(self, facts: LayerFacts) -> Tensor:
        weight_ED = facts.router.weight_ED[: facts.experts].double().cpu()
        return cosine(weight_ED @ weight_ED.T)
