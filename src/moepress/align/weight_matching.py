from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.align.base import ALIGNMENTS, Alignment, Expert
from moepress.models.layer import UNIT_AXIS


@ALIGNMENTS.register("weight-matching")
@dataclass(frozen=True)
class WeightMatching(Alignment):
    """The permutation of hidden units that brings the weights closest in squared distance: all of gate, up, down
    and biases count, since one permutation moves them all."""

    paper = "Git Re-Basin, https://arxiv.org/abs/2209.04836"

    def cost(self, reference: Expert, other: Expert) -> Tensor:
        # One GEMM: ‖a − Pb‖² = const − 2⟨a, Pb⟩, and the inner products of all matrices of a unit add up.
        return _unit_rows(reference) @ _unit_rows(other).T


def _unit_rows(expert: Expert) -> Tensor:
    """(F, everything that belongs to a unit), float32."""
    rows = []
    for name, tensor in expert.items():
        if name in UNIT_AXIS:
            unit_first = tensor.movedim(UNIT_AXIS[name], 0).float()
            rows.append(unit_first.reshape(unit_first.shape[0], -1))
    return torch.cat(rows, dim=1)
