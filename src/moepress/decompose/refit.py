"""Once it is known what S keeps, the low rank and S can be solved for again, together and in closed form.

The columns that S keeps are free: the low rank need not explain them, and they take over what they can of the error in
the others, as far as their inputs go along with the others' inputs. So the low rank is that of the remaining columns,
measured by the part of their inputs that the kept ones do not tell. Rows that S keeps are right whatever the low rank
is, which then is that of the remaining rows.

Shape suffixes: E experts, O output width, I input width, R rank, K kept columns (rows), C the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moepress.decompose.layer import AXES
from moepress.decompose.low_rank import low_rank, ridged
from moepress.models.layer import CompactSpec, MoELayer


@torch.no_grad()
def refit_layer(
    layer: MoELayer,
    spec: CompactSpec,
    kept: dict[str, Tensor],
    moments: dict[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> CompactSpec:
    """Prune a layer that has the whole of S to what is `kept` (N,), by matrix, and solve for what is left. `moments`
    and `dtype` as in `factor_layer`."""
    bank, old = layer.bank, layer.adapter.factors(layer.block)
    assert old is not None and spec.factors is not None
    solved = {}
    for name, matrix in old.matrices().items():
        w_EOI: Tensor = getattr(bank, AXES[name])
        parts = []
        for e, keep in enumerate(kept[name].split(matrix.kept_counts())):
            index = matrix.kept_of(e)[keep].long().sort().values
            moment = None if moments is None else moments[name][e]
            parts.append((*solve(w_EOI[e], index, spec.factors.rank, spec.factors.along, moment, dtype), index))
        solved[name] = parts
    counts: dict[str, Any] = {name: sum(len(part[3]) for part in parts) for name, parts in solved.items()}
    spec = replace(spec, factors=replace(spec.factors, **counts))
    factors = layer.adapter.factor(layer.block, spec)
    for name, parts in solved.items():
        u_EOR, v_ERI = (torch.stack([part[i] for part in parts]) for i in (0, 1))
        u_ERO = u_EOR.transpose(1, 2)
        thin, other = (v_ERI, u_ERO) if spec.factors.along == "columns" else (u_ERO, v_ERI)  # type: ignore[union-attr]
        factors.matrix(name).fill(thin, other, [part[2] for part in parts], [part[3] for part in parts])
    return spec


def solve(
    w_OI: Tensor, kept_K: Tensor, rank: int, along: str, moment_II: Tensor | None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """U (O, R), V (R, I) and the kept columns of S as rows (K, O), or its kept rows (K, I)."""
    w, axis = w_OI.float(), 1 if along == "columns" else 0
    other = torch.ones(w.shape[axis], dtype=torch.bool, device=w.device)
    other[kept_K] = False
    other_C = other.nonzero()[:, 0]
    u_OR, v_RI = w.new_zeros(len(w), rank), w.new_zeros(rank, w.shape[1])
    moment = None if moment_II is None else ridged(moment_II)
    if along == "rows":
        u_CR, v_RI = _low_rank(w[other_C], rank, moment)
        u_OR[other_C] = u_CR
        u_OR, v_RI = _rounded(u_OR, dtype), _rounded(v_RI, dtype)
        return u_OR, v_RI, w[kept_K]
    told_CK = None
    if moment is not None and len(kept_K):
        among_KK, across_KC = moment[kept_K][:, kept_K], moment[kept_K][:, other_C]
        told_CK = torch.linalg.solve(among_KK, across_KC).T
        untold = moment[other_C][:, other_C] - told_CK @ across_KC
        moment = (untold + untold.T) / 2
    elif moment is not None:
        moment = moment[other_C][:, other_C]
    u_OR, v_RC = _low_rank(w[:, other_C], rank, moment)
    u_OR, v_RC = _rounded(u_OR, dtype), _rounded(v_RC, dtype)
    v_RI[:, other_C] = v_RC
    s_OK = w[:, kept_K]
    if told_CK is not None:
        s_OK = s_OK + ((w[:, other_C] - u_OR @ v_RC).double() @ told_CK).float()
    return u_OR, v_RI, s_OK.T


def _low_rank(w: Tensor, rank: int, moment: Tensor | None) -> tuple[Tensor, Tensor]:
    """Filled up with zeros where less is left than the rank."""
    u, v = (factor[0] for factor in low_rank(w[None], rank, None if moment is None else moment[None]))
    missing = rank - u.shape[1]
    return torch.nn.functional.pad(u, (0, missing)), torch.nn.functional.pad(v, (0, 0, 0, missing))


def _rounded(factor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return factor if dtype is None else factor.to(dtype).float()
