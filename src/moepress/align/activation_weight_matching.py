"""Shape suffixes: F hidden units, K numbers that describe a unit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.align.activation_matching import ActivationMatching
from moepress.align.base import ALIGNMENTS, Expert
from moepress.align.weight_matching import WeightMatching
from moepress.models.inputs import ExpertInputs


@ALIGNMENTS.register("activation-weight-matching")
@dataclass(frozen=True)
class ActivationWeightMatching(ActivationMatching):
    """The permutation of hidden units with the highest total of two likenesses: the correlation of the units'
    activations over a sample of tokens, and the cosine of all their weights."""

    paper = "REAM, https://arxiv.org/abs/2604.04356"

    def units(self, expert: Expert, inputs: ExpertInputs | None) -> list[Tensor]:
        weight_FK = torch.cat([part.float().reshape(len(part), -1) for part in WeightMatching().units(expert, None)], 1)
        return [*super().units(expert, inputs), torch.nn.functional.normalize(weight_FK, dim=1)]
