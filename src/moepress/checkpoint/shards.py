"""safetensors files written tensor by tensor: never more than one of them in memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moepress.checkpoint.files import TensorFiles, bytes_of
from moepress.checkpoint.headers import NAMES


@dataclass(frozen=True)
class Item:
    """A tensor that is about to be written: what the header says, and where its bytes come from."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    chunks: Callable[[], Iterable[memoryview]]

    @classmethod
    def stored(cls, files: TensorFiles, name: str) -> Item:
        """As it is in a file, byte for byte."""
        entry = files.header[name]
        return cls(name, entry["dtype"], tuple(entry["shape"]), files.size(name), lambda: files.chunks(name))

    @classmethod
    def of(cls, name: str, tensor: Tensor, dtype: torch.dtype) -> Item:
        def chunks() -> Iterator[memoryview]:
            yield bytes_of(tensor.detach().to("cpu", dtype).contiguous())

        size = tensor.numel() * dtype.itemsize
        return cls(name, NAMES[dtype], tuple(tensor.shape), size, chunks if size else tuple)

    def shaped(self, shape: tuple[int, ...]) -> Item:
        return replace(self, shape=shape)


def write_file(path: Path, items: list[Item]) -> dict[str, object]:
    """Write a file as a whole or not at all; its entry for the manifest. It is on the disk when this returns."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for item in items:
        header[item.name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": [end, end + item.size]}
        end += item.size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    checksum = hashlib.sha256()
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb", buffering=0) as stream:
        for piece in _pieces(len(raw).to_bytes(8, "little") + raw, items):
            checksum.update(piece)
            _write(stream.fileno(), piece)
        os.fsync(stream.fileno())
        size = stream.tell()
    os.replace(partial, path)
    return {"file": path.name, "size": size, "sha256": checksum.hexdigest()}


def _write(handle: int, piece: bytes | memoryview) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(handle, view) :]


def _pieces(head: bytes, items: list[Item]) -> Iterator[bytes | memoryview]:
    yield head
    for item in items:
        yield from item.chunks()


def divided(items: Iterable[Item], limit: int) -> Iterator[list[Item]]:
    """In groups of at most so many bytes, one tensor at the least."""
    group: list[Item] = []
    held = 0
    for item in items:
        if group and held + item.size > limit:
            yield group
            group, held = [], 0
        group.append(item)
        held += item.size
    if group:
        yield group
