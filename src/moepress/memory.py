"""How much memory the process, or the GPU, has had at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

MMAP_THRESHOLD = -3
"""Of mallopt, in malloc.h."""
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class Peak:
    bytes: int | None = None
    """None where the system does not tell."""


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Of the GPU where there is one; otherwise of the process, everything that it held before included."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = high_water_mark(device)
        return
    reset = _reset()
    yield peak
    peak.bytes = high_water_mark(device) if reset else None


def high_water_mark(device: torch.device) -> int | None:
    """The most since the process began, or since `peak_memory` was entered."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return 1024 * int(found[0]) if found else None


def give_back() -> None:
    """Memory that was freed goes back to the system now: glibc keeps what may be wanted again."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def give_back_at_once() -> None:
    """From now on, tensors of a megabyte and more go back to the system as soon as they are freed. Otherwise glibc
    keeps those of up to 32 MB, and cannot use the holes between them for larger ones."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 20)


def _reset() -> bool:
    try:
        RESET.write_text("5")  # Linux: the high-water mark of the resident set becomes what is resident now
    except OSError:
        return False
    return True
