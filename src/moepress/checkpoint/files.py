"""The tensors of a checkpoint's files, read one at a time with pread into memory of ours: nothing stays mapped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from moepress.checkpoint.headers import DTYPES, Header
from moepress.errors import MoepressError

CHUNK = 1 << 23
"""Bytes that are read at a time where a tensor is not read straight to where it belongs."""


class TensorFiles:
    """Tensors by name. Files stay open until `close`."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self._open: dict[str, int] = {}
        self._buffer: Tensor | None = None
        self.bytes_read = 0

    def __contains__(self, name: str) -> bool:
        return name in self.header

    def size(self, name: str) -> int:
        begin, end = self.header[name]["data_offsets"]
        return end - begin

    def dtype(self, name: str) -> torch.dtype:
        stored = self.header[name]["dtype"]
        if stored not in DTYPES:
            raise MoepressError(f"{self.header[name]['file']}: {name} is stored as {stored}, which is not understood")
        return DTYPES[stored]

    def empty(self, name: str) -> Tensor:
        """Its shape and type, on the meta device."""
        return torch.empty(self.header[name]["shape"], dtype=self.dtype(name), device="meta")

    def read(self, name: str) -> Tensor:
        out = torch.empty(self.header[name]["shape"], dtype=self.dtype(name))
        self.read_into(name, out)
        return out

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Its numbers in a row, a stretch at a time and where that begins, in a buffer that the next one uses again."""
        size, dtype = self.size(name), self.dtype(name)
        if size and self._buffer is None:
            self._buffer = torch.empty(CHUNK, dtype=torch.uint8)
        for start in range(0, size, CHUNK):
            assert self._buffer is not None
            piece = self._buffer[: min(CHUNK, size - start)]
            self._fill(name, bytes_of(piece), start)
            yield start // dtype.itemsize, piece.view(dtype)

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill a contiguous tensor of the same type, and as many numbers."""
        if self.size(name):
            self._fill(name, bytes_of(out), 0)

    def chunks(self, name: str) -> Iterator[memoryview]:
        """Its bytes as they are, in pieces that are valid until the next one."""
        size = self.size(name)
        piece = memoryview(bytearray(min(size, CHUNK)))
        for start in range(0, size, CHUNK):
            part = piece[: min(CHUNK, size - start)]
            self._fill(name, part, start)
            yield part

    def _fill(self, name: str, room: memoryview, start: int) -> None:
        entry = self.header[name]
        file, offset, done = entry["file"], entry["start"] + start, 0
        try:
            handle = self._open.get(file)
            if handle is None:
                handle = self._open[file] = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            while done < len(room):
                count = os.preadv(handle, [room[done:]], offset + done)
                if count == 0:
                    raise MoepressError(f"{file} became shorter while it was read: {name} is cut off")
                done += count
        except OSError as error:
            raise MoepressError(f"{file} cannot be read: {error.strerror or error}") from error
        self.bytes_read += done

    def close(self) -> None:
        for handle in self._open.values():
            with suppress(OSError):
                os.close(handle)
        self._open.clear()


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor that is not empty."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def inside(folder: Path, name: str) -> Path:
    """A file of a folder by a name that comes from outside. It may not lead anywhere else."""
    if not name or name != Path(name).name or name in (".", "..") or "\0" in name:
        raise MoepressError(f"{folder} names a file {name!r}, which is not a file of that folder")
    return checked_link(folder, folder / name)


def checked_link(folder: Path, file: Path) -> Path:
    """Links may stay in the folder, or lead into the cache of the Hub that the folder is part of."""
    if file.is_symlink():
        target, home = Path(os.path.realpath(file)), Path(os.path.realpath(folder))
        allowed = [home]
        if home.parent.name == "snapshots":
            allowed.append(home.parent.parent / "blobs")
        if not any(place in target.parents for place in allowed):
            raise MoepressError(
                f"{file} is a link that leads out of its folder, to {target}: put the file there itself"
            )
    return file
