from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.plan.facts import LayerFacts
from moepress.plan.saliency.base import SALIENCIES, Saliency


@SALIENCIES.register("random")
@dataclass(frozen=True)
class Random(Saliency):
    """A random number for every expert: the control that every other saliency must beat."""

    def score(self, facts: LayerFacts) -> Tensor:
        # Not the numbers that the random similarity begins with.
        return torch.rand(2, facts.experts**2, dtype=torch.float64, generator=facts.generator())[1, : facts.experts]
