"""The tensors of a checkpoint's files, read one at a time with pread into memory of ours: nothing stays mapped."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
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

    description = ""
    """How weights are quantised."""

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

    def read_row(self, name: str, row: int) -> Tensor:
        """What lies at one index of its first axis."""
        out = torch.empty(self.header[name]["shape"][1:], dtype=self.dtype(name))
        if out.numel():
            self._fill(name, bytes_of(out), row * out.nbytes)
        return out

    def copy_to(self, name: str, place: Tensor, stored: torch.dtype) -> None:
        """Fill a tensor with values of the type `stored`, straight where it is of that type and on the CPU, otherwise
        through a buffer."""
        if self.dtype(name) == stored == place.dtype and place.device.type == "cpu":
            self.read_into(name, place)
        else:
            for start, piece in self.pieces(name):
                place.view(-1)[start : start + piece.numel()].copy_(piece.to(stored))

    def chunks(self, name: str, start: int = 0, end: int | None = None) -> Iterator[memoryview]:
        """Its bytes as they are, in pieces that are valid until the next one."""
        end = self.size(name) if end is None else end
        piece = memoryview(bytearray(min(end - start, CHUNK)))
        for begin in range(start, end, CHUNK):
            part = piece[: min(CHUNK, end - begin)]
            self._fill(name, part, begin)
            yield part

    # ---- how tensors are stored, which is not as they are where weights are quantised (`quantised/`) --------------

    @property
    def raw(self) -> TensorFiles:
        """The files as they are."""
        return self

    def beside(self, header: Header) -> TensorFiles:
        """Other files with tensors that are stored in the same way."""
        return TensorFiles(header)

    def stored(self, name: str) -> Mapping[str, str]:
        """The names of what a tensor is made of, by the role that each plays."""
        return {"values": name}

    def stored_as(self, name: str, new: str) -> Mapping[str, str]:
        """The same for a tensor `new` that is stored as this one is."""
        return {"values": new}

    def is_packed(self, name: str) -> bool:
        """Whether it is quantised."""
        return False

    def has_rows(self, name: str) -> bool:
        """Whether each index of the first axis is stored apart from the others."""
        return True

    def pack(self, values: Tensor, like: str) -> dict[str, Tensor]:
        """What is stored for these values, by role, if it is stored as the tensor `like` is."""
        return {"values": values.to("cpu", self.dtype(like))}

    def check(self, used: set[str]) -> None:
        """Raise if something is stored in a way that is not understood, where `used` are the tensors that the model is
        made of."""

    def describe(self, config: Path, again: int) -> list[str]:
        """Say in an output's config.json how its weights are stored, of which so many tensors have been stored anew;
        what to note in its report."""
        return []

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
