"""What a safetensors file says about itself in its header: names, dtypes and shapes, without reading any weight."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from moepress.errors import MoepressError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST = 100_000_000
"""Bytes of a header, as in the safetensors library."""

Header = dict[str, dict[str, Any]]
"""Tensor name -> {"dtype", "shape", "data_offsets", "file", "start"}; `start` is the first byte in the file."""


def read_header(file: str | os.PathLike[str]) -> Header:
    """Raises if the file is not whole, or says of its tensors what cannot be."""
    path = Path(file)
    broken = f"{path} is damaged: it is not a whole safetensors file (was the download or copy cut off?)"
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size - 8, LONGEST):
                raise MoepressError(broken)
            raw = stream.read(length)
    except OSError as error:
        raise MoepressError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(raw)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        places = [(*_place(entry), name) for name, entry in tensors.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise MoepressError(broken) from None
    end = 0
    for begin, after, name in sorted(places):
        if begin != end:
            raise MoepressError(f"{path} is damaged: {name} does not begin where the tensor before it ends")
        end = after
    if size < 8 + length + end:
        raise MoepressError(broken)
    if size > 8 + length + end:
        raise MoepressError(f"{path} is damaged: it is longer than its header says")
    return {
        name: entry | {"file": str(path), "start": 8 + length + entry["data_offsets"][0]}
        for name, entry in tensors.items()
    }


def _place(entry: dict[str, Any]) -> tuple[int, int]:
    """Where a tensor's bytes are. Raises if its shape, type and place do not go together."""
    shape, (begin, end) = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(entry["dtype"], str):
        raise ValueError
    for number in (*shape, begin, end):
        if type(number) is not int or not 0 <= number < 1 << 62:
            raise ValueError
    dtype = DTYPES.get(entry["dtype"])
    if end < begin or (dtype is not None and math.prod(shape) * dtype.itemsize != end - begin):
        raise ValueError
    return begin, end


def read_headers(files: Iterable[str | os.PathLike[str]]) -> Header:
    """The headers of all safetensors files of a checkpoint in one."""
    merged: Header = {}
    for file in files:
        if str(file).endswith(".safetensors"):
            merged |= read_header(file)
    return merged


def floating_dtypes(header: Header) -> set[torch.dtype]:
    """Of the floating-point tensors."""
    dtypes = {DTYPES[entry["dtype"]] for entry in header.values() if entry["dtype"] in DTYPES}
    return {dtype for dtype in dtypes if dtype.is_floating_point}
