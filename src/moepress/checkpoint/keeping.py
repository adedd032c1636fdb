"""A changed layer as it goes into the output's files: bytes of the original wherever nothing has changed.

That matters where the files hold something else than the model computes with: quantised weights, or weights of another
floating-point type than the model's. What has changed is stored as what it takes the place of was stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from moepress.checkpoint.files import TensorFiles, bytes_of
from moepress.checkpoint.headers import NAMES
from moepress.checkpoint.shards import Item
from moepress.plan import LayerPlan

NUMBER = re.compile(r"(?<=\.experts\.)((?:expert_)?)(\d+)(?=\.)")


class Keeper:
    """Of one layer."""

    def __init__(self, files: TensorFiles, plan: LayerPlan) -> None:
        self.files = files
        self.leaders = [group.leader for group in plan.groups]
        self.experts = plan.experts
        self.rounded = 0
        """Tensors (of one expert each, if they are experts') that lost precision when they were stored."""

    def items(self, name: str, tensor: Tensor, dtype: torch.dtype) -> list[Item]:
        """What to write for a tensor of the output that has a type `dtype` in the model."""
        files, origin = self.files, self.origin(name)
        if origin not in files or (not files.is_packed(origin) and files.dtype(origin) == dtype):
            return [Item.of(name, tensor, dtype)]
        shape = tuple(files.header[origin]["shape"])
        if tensor.shape == shape and same(files.read(origin), tensor, dtype):
            stored = files.stored(origin)
            return [
                replace(Item.stored(files.raw, stored[role]), name=new)
                for role, new in files.stored_as(origin, name).items()
            ]
        cut = (len(self.leaders), *shape[1:])
        if tensor.shape == cut and shape[0] == self.experts and files.has_rows(origin):
            return self._by_row(name, tensor, dtype, origin)
        self.rounded += 1
        packed = files.pack(tensor.to(dtype), origin)
        return [Item.of(new, packed[role], packed[role].dtype) for role, new in files.stored_as(origin, name).items()]

    def origin(self, name: str) -> str:
        """The name in the input of what a tensor of the output has come from."""
        return NUMBER.sub(lambda found: f"{found[1]}{self.leaders[int(found[2])]}", name)

    def _by_row(self, name: str, tensor: Tensor, dtype: torch.dtype, origin: str) -> list[Item]:
        """All experts in one tensor: each is copied or stored anew."""
        files = self.files
        rows: list[int | dict[str, Tensor]] = []
        for row, leader in zip(tensor, self.leaders, strict=True):
            kept = same(files.read_row(origin, leader), row, dtype)
            rows.append(leader if kept else files.pack(row.to(dtype), origin))
        self.rounded += sum(not isinstance(row, int) for row in rows)
        return [
            self._stacked(new, files.stored(origin)[role], role, rows)
            for role, new in files.stored_as(origin, name).items()
        ]

    def _stacked(self, name: str, stored: str, role: str, rows: list[int | dict[str, Tensor]]) -> Item:
        raw = self.files.raw
        one = raw.size(stored) // self.experts

        def chunks() -> Iterator[memoryview]:
            for row in rows:
                if isinstance(row, int):
                    yield from raw.chunks(stored, row * one, (row + 1) * one)
                else:
                    yield bytes_of(row[role].contiguous())

        shape = (len(rows), *raw.header[stored]["shape"][1:])
        return Item(name, NAMES[raw.dtype(stored)], shape, one * len(rows), chunks)


def same(original: Tensor, now: Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor of the model, of a type `dtype` or wider, is still what was read."""
    return torch.equal(original.to(dtype), now.to("cpu", dtype))
