"""Tensors of several experts that lie one after the other in memory, so that they are one tensor without a copy."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNED = 64
"""Bytes. Where torch puts tensors; products of numbers at other addresses may be rounded otherwise."""


def side_by_side(count: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Uninitialised tensors, one after the other in one piece of memory if that is where torch would put each of them
    anyway, so that `stacked_in_place` copies nothing."""
    if shape.numel() * dtype.itemsize % ALIGNED:
        return [torch.empty(shape, dtype=dtype, device=device) for _ in range(count)]
    return list(torch.empty(count, *shape, dtype=dtype, device=device))


def stacked_in_place(tensors: list[Tensor]) -> Tensor:
    """Tensors of one shape with an axis before the others; a view if they are contiguous and lie side by side."""
    first = tensors[0]
    size = first.numel()
    if all(
        t.is_contiguous()
        and t.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and t.storage_offset() == first.storage_offset() + i * size
        for i, t in enumerate(tensors)
    ):
        return first.as_strided((len(tensors), *first.shape), (size, *first.stride()))
    return torch.stack(tensors)
