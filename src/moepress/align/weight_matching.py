from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.align.base import ALIGNMENTS, Alignment, Expert
from moepress.align.costs import Operands
from moepress.models.inputs import ExpertInputs
from moepress.models.layer import UNIT_AXIS


@ALIGNMENTS.register("weight-matching")
@dataclass(frozen=True)
class WeightMatching(Alignment):
    """The permutation of hidden units that brings the weights closest in squared distance: all of gate, up, down
    and biases count, since one permutation moves them all."""

    paper = "Git Re-Basin, https://arxiv.org/abs/2209.04836"

    operands: Operands = "stored"
    """`bfloat16` rounds weights before they are compared: faster, for less than 1e-4 of the best total."""

    def units(self, expert: Expert, inputs: ExpertInputs | None) -> list[Tensor]:
        # ‖a − Pb‖² = const − 2⟨a, Pb⟩, and the inner products of all tensors of a unit add up.
        unit_first = [tensor.movedim(UNIT_AXIS[name], 0) for name, tensor in expert.items() if name in UNIT_AXIS]
        matrices = [tensor for tensor in unit_first if tensor.dim() == 2]
        biases = [tensor for tensor in unit_first if tensor.dim() == 1]
        return [*matrices, torch.stack(biases, dim=1)] if biases else matrices
