from dataclasses import dataclass

from torch import Tensor

from moepress.plan.facts import LayerFacts, cosine
from moepress.plan.similarity.base import SIMILARITIES, Similarity


@SIMILARITIES.register("expert-feature")
@dataclass(frozen=True)
class ExpertFeature(Similarity):
    """Cosine of the mean inputs of two experts' tokens. An expert without tokens is similar to nothing."""

    paper = "MC-SMoE, https://arxiv.org/abs/2310.01334"
    needs = ("features",)

    def matrix(self, facts: LayerFacts) -> Tensor:
        sum_ED = facts.statistics["features"]["sum"]  # a cosine does not see the division by the number of tokens
        return cosine(sum_ED @ sum_ED.T)


@SIMILARITIES.register("expert-feature.abs")
@dataclass(frozen=True)
class ExpertFeatureAbs(Similarity):
    """Cosine of the mean absolute inputs of two experts' tokens."""

    paper = "MC-SMoE, https://arxiv.org/abs/2310.01334"
    needs = ("features",)

    def matrix(self, facts: LayerFacts) -> Tensor:
        abs_ED = facts.statistics["features"]["abs"]
        return cosine(abs_ED @ abs_ED.T)
