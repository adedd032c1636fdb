"""A model in another precision for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from moepress.errors import MoepressError

NARROW = (torch.bfloat16, torch.float16)
"""What is widened. Quantised storage (8 bits and less) is left to the code that knows what it means."""


@contextmanager
def in_dtype(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """16-bit weights in `dtype` inside the block, in their own dtype again after it; None changes nothing.

    Widening and narrowing again gives the same weights bit for bit, if nobody changed them in between.
    """
    if dtype is None:
        yield
        return
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers()) if t.dtype in NARROW and t.dtype != dtype}
    if any(tensor.is_meta for tensor in tensors.values()):
        raise MoepressError("the model is offloaded, so its precision cannot be changed: use its own (dtype=None)")
    before = {i: tensor.dtype for i, tensor in tensors.items()}
    try:
        for tensor in tensors.values():
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for i, tensor in tensors.items():
            tensor.data = tensor.data.to(before[i])
