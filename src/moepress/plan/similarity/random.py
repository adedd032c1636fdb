from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.plan.facts import LayerFacts
from moepress.plan.similarity.base import SIMILARITIES, Similarity


@SIMILARITIES.register("random")
@dataclass(frozen=True)
class Random(Similarity):
    """A random number for every pair of experts: the control that every other similarity must beat."""

    paper = "MC-SMoE, https://arxiv.org/abs/2310.01334"

    def matrix(self, facts: LayerFacts) -> Tensor:
        draw_EE = torch.rand(facts.experts, facts.experts, dtype=torch.float64, generator=facts.generator())
        return (draw_EE + draw_EE.T) / 2
