"""Scores from how much each expert adds to the layer's output: REAP and its relatives, which differ in the mean."""

from dataclasses import dataclass

from torch import Tensor

from moepress.plan.facts import LayerFacts
from moepress.plan.saliency.base import SALIENCIES, Saliency

REAP = "REAP, https://arxiv.org/abs/2510.13999"


@SALIENCIES.register("reap")
@dataclass(frozen=True)
class Reap(Saliency):
    """Router weight times norm of the output, averaged over the tokens that chose the expert. An expert that few
    tokens choose can rank first: good where routing is balanced."""

    paper = REAP
    needs = ("output-norm",)

    def score(self, facts: LayerFacts) -> Tensor:
        sums = facts.statistics["output-norm"]
        return sums["gated"] / sums["routed"].clamp_min(1)


@SALIENCIES.register("reap-all")
@dataclass(frozen=True)
class ReapAll(Saliency):
    """Router weight times norm of the output, averaged over all tokens: what the expert adds to the layer as a whole.
    Good where routing is skewed."""

    paper = REAP
    needs = ("output-norm",)

    def score(self, facts: LayerFacts) -> Tensor:
        sums = facts.statistics["output-norm"]
        return sums["gated"] / sums["tokens"].clamp_min(1)


@SALIENCIES.register("output-energy")
@dataclass(frozen=True)
class OutputEnergy(Saliency):
    """Squared router weight times squared norm of the output, averaged over all tokens: the squared error that is
    left when the expert is dropped and nothing takes its place."""

    needs = ("output-norm",)

    def score(self, facts: LayerFacts) -> Tensor:
        sums = facts.statistics["output-norm"]
        return sums["gated_square"] / sums["tokens"].clamp_min(1)
