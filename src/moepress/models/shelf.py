"""Where calibration activations wait: in memory, or in files of which only what is being worked on is in memory.

A tensor on the shelf is an ordinary one whose memory is a mapped file: its pages come when they are touched and leave
the process again with `release`. What a suspended forward pass holds is found in the variables of its Python frames;
its memory is given back while it waits, and is filled again before the pass goes on.
"""

from __future__ import annotations

import ctypes
import inspect
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from greenlet import greenlet
from torch import Tensor, nn

from moepress.errors import MoepressError

SMALL = 1 << 16
"""Bytes. Tensors that are smaller stay in memory."""
T = TypeVar("T")


class Shelf:
    """All in memory: nothing has to be done."""

    spills = False

    def put(self, value: T) -> T:
        """A tensor, or a tuple, list, dict or dataclass of such, as it is to be kept."""
        return value

    def release(self) -> None:
        """What was looked at is not needed in memory any more."""

    def suspended(self, number: int, runner: greenlet, model: nn.Module, spared: Iterable[Tensor]) -> None:
        """A forward pass waits. `spared` are tensors that others use, too."""

    def resume(self, number: int) -> None:
        """It is about to go on: from here on, what it held is in memory."""

    def clear(self) -> None:
        """No forward pass waits any more."""


class Spill(Shelf):
    """In files of a folder, which have no names there and are gone with the process."""

    spills = True

    def __init__(self, folder: Path, small: int = SMALL) -> None:
        self.folder, self.small = folder, small
        self._mapped: list[weakref.ref[torch.UntypedStorage]] = []
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._waiting: dict[int, list[tuple[torch.UntypedStorage, Tensor]]] = {}
        self.bytes = 0
        """That were written."""

    def put(self, value: T) -> T:
        kept = self._put(value)
        self.release()
        return kept

    def _put(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._file(value) if self._large(value) else value
        if isinstance(value, dict):
            return {key: self._put(item) for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._put, value)) if type(value) in (tuple, list) else value
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: self._put(getattr(value, f.name)) for f in fields(value) if f.init})
        return value

    def _large(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided
        return plain and tensor.numel() * tensor.element_size() >= self.small and tensor.untyped_storage().resizable()

    def _file(self, tensor: Tensor) -> Tensor:
        storage = self._new(tensor.numel() * tensor.element_size())
        return torch.empty(0, dtype=tensor.dtype).set_(storage).view(tensor.shape).copy_(tensor)  # type: ignore[call-overload]

    def _new(self, size: int) -> torch.UntypedStorage:
        try:
            self.folder.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk says so here, and not when a page is written
                storage: Any = torch.UntypedStorage.from_file(file.name, True, size)
        except OSError as error:
            raise MoepressError(
                f"calibration activations cannot be written to {self.folder}: {error.strerror}; free some space, allow "
                "more --memory, or take fewer samples"
            ) from error
        self._mapped.append(weakref.ref(storage))
        self.bytes += size
        return storage

    def release(self) -> None:
        alive = [(ref, storage) for ref in self._mapped if (storage := ref()) is not None]
        for _, storage in alive:  # of a shared mapping: nothing is lost
            self._madvise(storage.data_ptr(), storage.nbytes(), mmap.MADV_DONTNEED)
        self._mapped = [ref for ref, _ in alive]

    def suspended(self, number: int, runner: greenlet, model: nn.Module, spared: Iterable[Tensor]) -> None:
        others = {t.untyped_storage()._cdata for t in (*tensors_of(model), *spared) if not t.is_meta}
        held = {}
        for tensor in held_by(runner):
            storage = tensor.untyped_storage()
            if storage._cdata not in others and storage.resizable() and storage.nbytes() >= self.small:
                held[storage._cdata] = storage
        self._waiting[number] = [(storage, self._file(bytes_of(storage))) for storage in held.values()]
        for storage in held.values():
            storage.resize_(0)
        self.release()

    def resume(self, number: int) -> None:
        for storage, kept in self._waiting.pop(number, ()):
            storage.resize_(kept.numel())
            bytes_of(storage).copy_(kept)
        self.release()

    def clear(self) -> None:
        self._waiting.clear()


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """All that the modules hold, whether as parameters or on the side."""
    for module in model.modules():
        yield from tensors_in(
            [value for name, value in module.__dict__.items() if name not in ("_modules", "forward")], depth=2
        )


def held_by(runner: greenlet) -> Iterator[Tensor]:
    """Tensors in the variables of a suspended greenlet."""
    frame = runner.gr_frame
    while frame is not None:
        variables = frame.f_locals
        yield from tensors_in(list(variables.values()), depth=4)
        if type(variables) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            variables.clear()  # before Python 3.13 a copy that lives as long as the frame
        frame = frame.f_back


def tensors_in(values: Iterable[Any], depth: int) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif depth and isinstance(value, dict):
            yield from tensors_in(value.values(), depth - 1)
        elif depth and isinstance(value, (tuple, list)):
            yield from tensors_in(value, depth - 1)
        elif depth and hasattr(type(value), "__dataclass_fields__"):
            yield from tensors_in(vars(value).values(), depth - 1)
