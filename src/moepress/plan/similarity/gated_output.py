"""Experts are alike if they add the same to the layer."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moepress.plan.facts import LayerFacts, cosine
from moepress.plan.similarity.base import SIMILARITIES, Similarity

REAM = "REAM, https://arxiv.org/abs/2604.04356"


@SIMILARITIES.register("gated-output")
@dataclass(frozen=True)
class GatedOutput(Similarity):
    """What two experts add to the layer on average: output times router weight, which is 0 for the tokens of others."""

    measure: Literal["cosine", "distance"] = "cosine"
    """By the distance all experts that add little are alike; by the cosine an expert without tokens is like nobody."""

    paper = REAM
    needs = ("gated-output", "usage")

    def matrix(self, facts: LayerFacts) -> Tensor:
        sum_ED = facts.statistics["gated-output"]["sum"]
        if self.measure == "cosine":
            return cosine(sum_ED @ sum_ED.T)
        mean_ED = sum_ED / facts.statistics["usage"]["tokens"].clamp_min(1)
        return -torch.cdist(mean_ED, mean_ED, compute_mode="donot_use_mm_for_euclid_dist")


@SIMILARITIES.register("gated-output+router-logits")
@dataclass(frozen=True)
class GatedOutputAndLogits(Similarity):
    """The mean of two cosines: of what two experts add to the layer, and of their router logits."""

    paper = REAM
    needs = ("gated-output", "router-gram")

    def matrix(self, facts: LayerFacts) -> Tensor:
        return (GatedOutput().matrix(facts) + cosine(facts.statistics["router-gram"]["gram"])) / 2
