"""How much each column (or row) of S matters: |s · ∇s|, added up over its entries.

Shape suffixes: N rows of S of all experts of a matrix, P packed rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from moepress.errors import MoepressError
from moepress.models.find import find_layers
from moepress.runtime.factors import FactoredMatrix

Reduce = Literal["sum", "mean"]


def factored_matrices(model: nn.Module) -> dict[str, FactoredMatrix]:
    """Every factored matrix of a model by its layer's path and its name, such as `model.layers.1.mlp:up`."""
    found: dict[str, FactoredMatrix] = {}
    for layer in find_layers(model):
        factors = layer.adapter.factors(layer.block)
        if factors is not None:
            found |= {f"{layer.name}:{name}": matrix for name, matrix in factors.matrices().items()}
    if not found:
        raise MoepressError("this model is not decomposed: there is nothing to prune in it")
    return found


@dataclass(frozen=True)
class Importance:
    """`smoothing`: how much of the running average stays at each step; None averages all steps alike."""

    reduce: Reduce = "sum"
    smoothing: float | None = 0.85

    def __post_init__(self) -> None:
        if self.reduce not in ("sum", "mean"):
            raise MoepressError(f"decompose.reduce is sum or mean, not {self.reduce!r}")
        if self.smoothing is not None and not 0 <= self.smoothing < 1:
            raise MoepressError(f"decompose.smoothing must be from 0 to 1 (exclusive), not {self.smoothing}")

    @torch.no_grad()
    def scores(self, matrix: FactoredMatrix) -> Tensor:
        """(N,) at this step, from the gradients as they are; zeros where none arrived."""
        packed, rows = matrix.packed_Px, matrix.sparse_rows()
        if packed.grad is None:
            return torch.zeros(len(rows), device=packed.device)
        sums_P = torch.linalg.vector_norm((packed * packed.grad).float(), ord=1, dim=1)
        return sums_P[rows] / (packed.shape[1] if self.reduce == "mean" else 1)

    def smoothed(self, before: Tensor | None, now: Tensor, step: int) -> Tensor:
        """The running average after this step, the first of which is 1."""
        if before is None:
            before = torch.zeros_like(now)
        share = 1 / step if self.smoothing is None else 1 - self.smoothing
        return before.to(now.device) * (1 - share) + now * share


def strongest_slices(scores: dict[str, Tensor], lengths: dict[str, int], share: float) -> dict[str, Tensor]:
    """Which columns (rows) stay so that S keeps at most this share of its entries, over all matrices together: those
    with the highest scores. Of equal ones the earlier stays, and no other is lost with it."""
    if not 0 <= share <= 1:
        raise MoepressError(f"the share of S that stays must be from 0 to 1, not {share}")
    names = list(scores)
    flat = torch.cat([scores[name].detach().double().cpu() for name in names])
    if not bool(torch.isfinite(flat).all()):
        raise MoepressError("the importance of some columns is not finite: the gradients have overflowed")
    length = torch.cat([torch.full((len(scores[name]),), lengths[name], dtype=torch.long) for name in names])
    order = flat.argsort(descending=True, stable=True)
    budget = round(share * int(length.sum()))
    kept = torch.zeros(len(flat), dtype=torch.bool)
    kept[order[length[order].cumsum(0) <= budget]] = True
    parts = kept.split([len(scores[name]) for name in names])
    return {name: part.to(scores[name].device) for name, part in zip(names, parts, strict=True)}
