"""Experts are alike if they add the same to the layer."""

from dataclasses import dataclass

from torch import Tensor

from moepress.plan.facts import LayerFacts, cosine
from moepress.plan.similarity.base import SIMILARITIES, Similarity

REAM = "REAM, https://arxiv.org/abs/2604.04356"


@SIMILARITIES.register("gated-output")
@dataclass(frozen=True)
class GatedOutput(Similarity):
    """Cosine of what two experts add to the layer on average: output times router weight over their own tokens. An
    expert without tokens is similar to nothing."""

    paper = REAM
    needs = ("gated-output",)

    def matrix(self, facts: LayerFacts) -> Tensor:
        sum_ED = facts.statistics["gated-output"]["sum"]
        return cosine(sum_ED @ sum_ED.T)


@SIMILARITIES.register("gated-output+router-logits")
@dataclass(frozen=True)
class GatedOutputAndLogits(Similarity):
    """The mean of two cosines: of what two experts add to the layer, and of their router logits."""

    paper = REAM
    needs = ("gated-output", "router-gram")

    def matrix(self, facts: LayerFacts) -> Tensor:
        return (GatedOutput().matrix(facts) + cosine(facts.statistics["router-gram"]["gram"])) / 2
