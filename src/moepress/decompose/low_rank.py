"""The part of a matrix that few directions explain.

Shape suffixes: E experts, O output width, I input width, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-3
"""Of the mean second moment, added to all directions: one that the text never showed still counts a little."""


def low_rank(w_EOI: Tensor, rank: int, moment_EII: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """U (E, O, R) and V (E, R, I) in float32 whose product is nearest to W: entry by entry or, given the second moment
    E[x xᵀ] of each expert's inputs, nearest in what it makes of them. Both factors are equally large."""
    made = [_one(w_OI, rank, None if moment_EII is None else moment_EII[e]) for e, w_OI in enumerate(w_EOI)]
    return torch.stack([u for u, _ in made]), torch.stack([v for _, v in made])


def _one(w_OI: Tensor, rank: int, moment_II: Tensor | None) -> tuple[Tensor, Tensor]:
    w = w_OI.float()
    root = None if moment_II is None else _root(moment_II)
    left, values, right = torch.linalg.svd(w if root is None else (w.double() @ root).float(), full_matrices=False)
    size = values[:rank].sqrt()
    u_OR, v_RI = left[:, :rank] * size, right[:rank] * size[:, None]
    if root is not None:  # right = V root: back to V
        v_RI = torch.linalg.solve_triangular(root, v_RI.double(), upper=False, left=False).float()
    return u_OR, v_RI


def _root(moment_II: Tensor) -> Tensor | None:
    """The lower L of L Lᵀ = the moment with its ridge; None for an expert that nothing is known of."""
    moment = ridged(moment_II)
    return None if moment is None else torch.linalg.cholesky(moment)


def ridged(moment_II: Tensor) -> Tensor | None:
    moment = moment_II.double()
    mean = moment.diagonal().mean() if len(moment) else moment.new_zeros(())
    if not float(mean) > 0:
        return None
    return moment + RIDGE * mean * torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
