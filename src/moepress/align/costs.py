"""Cost matrices: what each pair of units of two experts has in common, as matrix products.

One pair after the other, into memory that is there already: products of this size fill a device each, and to batch
them would mean to copy all weights of a layer first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Units = list[Tensor]
"""Matrices (F, K) with a row for each hidden unit."""
Operands = Literal["stored", "bfloat16"]


def fill_costs(costs_NFF: Tensor, pairs: Sequence[tuple[Units, Units]], operands: Operands = "stored") -> None:
    """The inner products of all units of two experts, for each pair, in float32.

    `stored` rounds nothing: narrow weights are multiplied as they are on CUDA, which adds up in float32, and widened
    first elsewhere. `bfloat16` rounds the weights, and on a CPU each product too: 2 to 10 times faster for less than
    1e-4 of the best total.
    """
    for cost_FF, (reference, other) in zip(costs_NFF, pairs, strict=True):
        if costs_NFF.is_cuda:
            _multiply_on_cuda(cost_FF, reference, other, operands)
        else:
            _multiply(cost_FF, reference, other, operands)


def _multiply_on_cuda(cost_FF: Tensor, reference: Units, other: Units, operands: Operands) -> None:
    dtypes = {part.dtype for part in (*reference, *other)}
    narrow = torch.bfloat16 if operands == "bfloat16" else dtypes.pop() if len(dtypes) == 1 else None
    if narrow not in (torch.bfloat16, torch.float16):
        _multiply(cost_FF, reference, other, "stored")
        return
    ref_FK, other_FK = (torch.cat([part.to(narrow) for part in parts], dim=1) for parts in (reference, other))
    torch.mm(ref_FK, other_FK.T, out_dtype=torch.float32, out=cost_FF)


def _multiply(cost_FF: Tensor, reference: Units, other: Units, operands: Operands) -> None:
    """Matrix by matrix, without a copy of what is float32."""
    for part, (ref_FK, other_FK) in enumerate(zip(reference, other, strict=True)):
        if operands == "bfloat16":
            product_FF = ref_FK.bfloat16() @ other_FK.bfloat16().T
            cost_FF.copy_(product_FF) if part == 0 else cost_FF.add_(product_FF)
        else:
            # beta = 0 ignores what stands there, NaN included.
            torch.addmm(cost_FF, ref_FK.float(), other_FK.float().T, beta=min(part, 1), out=cost_FF)


def squared_norms(experts: Sequence[Units]) -> Tensor:
    """(N, F): of each unit's rows over all matrices of its expert, in float32."""
    return torch.stack([torch.stack([_squared_norm(part) for part in parts]).sum(dim=0) for parts in experts])


def _squared_norm(part_FK: Tensor) -> Tensor:
    wide = torch.promote_types(part_FK.dtype, torch.float32)
    return torch.linalg.vector_norm(part_FK, dim=1, dtype=wide).square().float()
