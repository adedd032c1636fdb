"""How many directions a matrix really uses: ‖W‖²_F / ‖W‖²₂."""

from __future__ import annotations

import torch
from torch import Tensor

from moepress.models.layer import ExpertBank

MATRICES = {"gate": "gate_EFD", "up": "up_EFD", "down": "down_EDF"}


@torch.no_grad()
def stable_ranks(bank: ExpertBank) -> dict[str, list[float]]:
    """By matrix, one number an expert."""
    named = bank.tensors()
    return {name: [stable_rank(w) for w in named[field]] for name, field in MATRICES.items() if field in named}


def mean_ranks(by_matrix: dict[str, list[float]]) -> list[float]:
    """Over the matrices of each expert."""
    return [sum(each) / len(each) for each in zip(*by_matrix.values(), strict=True)]


def stable_rank(w: Tensor) -> float:
    wide = w.float() if w.shape[0] <= w.shape[1] else w.float().T
    largest = float(torch.linalg.eigvalsh(wide @ wide.T)[-1])
    return float(wide.square().sum()) / largest if largest > 0 else 0.0
