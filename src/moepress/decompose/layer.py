"""Give one layer's experts the form W = UV + S, and later take away what S does not keep.

Shape suffixes: E experts, O output width, I input width, R rank, N rows of S of all experts, P packed rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moepress.decompose.low_rank import low_rank
from moepress.errors import MoepressError
from moepress.models.layer import CompactSpec, ExpertBank, Factors, MoELayer

AXES = {"gate": "gate_EFD", "up": "up_EFD", "down": "down_EDF"}


@torch.no_grad()
def factor_layer(
    layer: MoELayer,
    spec: CompactSpec,
    rank: int,
    along: str,
    moments: dict[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> CompactSpec:
    """Decompose every expert of a layer, with the whole of S: what it computes does not change. `spec` is the layer's
    shape so far; `moments` the second moments (E, I, I) of the inputs by matrix. U and V have values that `dtype`
    can hold, where they are going to be stored so; S is the rest of those."""
    bank = layer.bank
    made = {name: _factored(bank, name, rank, along, (moments or {}).get(name), dtype) for name in _matrices(bank)}
    shape = full_shape(bank, rank, along)
    spec = replace(spec, factors=shape)
    factors = layer.adapter.factor(layer.block, spec)
    for name, (thin_ERx, other_ERx, s_Exx) in made.items():
        every = torch.arange(s_Exx.shape[1], device=s_Exx.device)
        factors.matrix(name).fill(thin_ERx, other_ERx, list(s_Exx), [every] * len(s_Exx))
    return spec


def _factored(
    bank: ExpertBank, name: str, rank: int, along: str, moment: Tensor | None, dtype: torch.dtype | None
) -> tuple[Tensor, ...]:
    w_EOI: Tensor = getattr(bank, AXES[name])
    u_EOR, v_ERI = low_rank(w_EOI, rank, moment)
    u_EOR, v_ERI = (factor.to(dtype or w_EOI.dtype).to(w_EOI.dtype) for factor in (u_EOR, v_ERI))
    s_EOI = (w_EOI.float() - u_EOR.float() @ v_ERI.float()).to(w_EOI.dtype)
    u_ERO = u_EOR.transpose(1, 2)
    return (v_ERI, u_ERO, s_EOI.transpose(1, 2)) if along == "columns" else (u_ERO, v_ERI, s_EOI)


def _matrices(bank: ExpertBank) -> list[str]:
    return [name for name, field in AXES.items() if field in bank.tensors()]


def full_shape(bank: ExpertBank, rank: int, along: str) -> Factors:
    """The shape of a layer's factors before anything is pruned."""
    experts, hidden, width = bank.up_EFD.shape
    first, second = (width, hidden) if along == "columns" else (hidden, width)
    return Factors(
        min(rank, hidden, width),
        along,
        up=experts * first,
        down=experts * second,
        gate=None if bank.gate_EFD is None else experts * first,
    )


@torch.no_grad()
def prune_layer(layer: MoELayer, spec: CompactSpec, kept: dict[str, Tensor]) -> CompactSpec:
    """Remove the rows of S that are not `kept` (N,), by matrix; the tensors really get smaller."""
    old = layer.adapter.factors(layer.block)
    if old is None or spec.factors is None:
        raise MoepressError(f"the experts of layer {layer.name!r} are not decomposed: there is nothing to prune")
    counts: dict[str, Any] = {name: int(kept[name].sum()) for name in old.matrices()}
    spec = replace(spec, factors=replace(spec.factors, **counts))
    new = layer.adapter.factor(layer.block, spec)
    for name, matrix in old.matrices().items():
        sparse, index, other = [], [], []
        bounds = matrix.bounds()
        for e in range(matrix.experts):
            packed = matrix.packed_Px[matrix.packed_of(e)]
            mine_N = kept[name][bounds[e] : bounds[e + 1]]
            other.append(packed[: matrix.rank])
            sparse.append(packed[matrix.rank :][mine_N])
            index.append(matrix.kept_of(e)[mine_N])
        new.matrix(name).fill(matrix.thin_ERx, torch.stack(other), sparse, index)
    return spec
