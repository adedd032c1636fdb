"""Products of sorted tokens with one matrix per expert, in one kernel where there is one.

Shape suffixes: E experts, C columns padded for a whole layer, n tokens in the order of their experts, I and O widths.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

MULTIPLE = 8
"""Strides of grouped products must be multiples of 16 bytes: 8 numbers of 16 bits."""

GROUPED = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def suits_grouped(sizes: tuple[int, ...]) -> bool:
    return GROUPED is not None and bool(sizes) and all(size % MULTIPLE == 0 for size in sizes)


def grouped_product(x_nI: Tensor, w_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Rows after the last end are not written."""
    assert GROUPED is not None
    return GROUPED(x_nI.to(w_EIO.dtype), w_EIO, offs=ends_E)


def padded(bounds: list[int], rank: int, index_N: Tensor) -> tuple[Tensor | None, Tensor]:
    """The ragged rows as a rectangle. For each expert which packed rows it has, `rank` of the low rank and then its
    own of S, filled up with the number of the row after the last, which is to be zero; and their columns, filled up
    with column 0. As wide as the expert with most of them, rounded up so that rank and columns divide. Without rows
    if they are a rectangle as they lie."""
    experts = len(bounds) - 1
    counts = [bounds[e + 1] - bounds[e] for e in range(experts)]
    width = max(counts, default=0)
    width += -(rank + width) % MULTIPLE
    if set(counts) == {width}:
        return None, index_N.long().view(experts, width)
    device, last = index_N.device, experts * rank + bounds[-1]
    place_C = torch.arange(width, device=device)
    first_E1 = torch.tensor(bounds[:-1], device=device)[:, None]
    own_EC = place_C < torch.tensor(counts, device=device)[:, None]
    expert_E1 = torch.arange(experts, device=device)[:, None]
    sparse_EC = torch.where(own_EC, first_E1 + (expert_E1 + 1) * rank + place_C, last)
    low_ER = first_E1 + expert_E1 * rank + torch.arange(rank, device=device)
    index = torch.cat([index_N.long(), index_N.new_zeros(1).long()])
    index_EC = torch.where(own_EC, index[torch.where(own_EC, first_E1 + place_C, bounds[-1])], 0)
    return torch.cat([low_ER, sparse_EC], dim=1), index_EC
