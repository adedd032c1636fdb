from dataclasses import dataclass

from torch import Tensor

from moepress.plan.facts import LayerFacts, cosine
from moepress.plan.similarity.base import SIMILARITIES, Similarity


@SIMILARITIES.register("expert-gradient")
@dataclass(frozen=True)
class ExpertGradient(Similarity):
    """Cosine of the mean gradients of the loss on the calibration text, with respect to two experts' weights. One more
    pass, with gradients; an expert without tokens is similar to nothing. Meaningful on aligned experts only: use it
    with `align.reference: first`."""

    paper = "MC-SMoE, https://arxiv.org/abs/2310.01334"
    needs = ("gradient-gram",)

    def matrix(self, facts: LayerFacts) -> Tensor:
        return cosine(facts.statistics["gradient-gram"]["gram"])
