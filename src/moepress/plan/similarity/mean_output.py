from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.plan.facts import LayerFacts
from moepress.plan.similarity.base import SIMILARITIES, Similarity


@SIMILARITIES.register("mean-output")
@dataclass(frozen=True)
class MeanOutput(Similarity):
    """Minus the distance of two experts' mean outputs over the same tokens, whichever experts these were routed to."""

    paper = "HC-SMoE, https://arxiv.org/abs/2410.08589"
    needs = ("mean-output",)

    def matrix(self, facts: LayerFacts) -> Tensor:
        sums = facts.statistics["mean-output"]
        mean_ED = sums["sum"] / sums["tokens"].clamp_min(1)
        return -torch.cdist(mean_ED, mean_ED, compute_mode="donot_use_mm_for_euclid_dist")
