"""What a safetensors file says about itself in its header: names, dtypes and shapes, without reading any weight."""

from __future__ import annotations

import json
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
}


Header = dict[str, dict[str, Any]]
"""Tensor name -> {"dtype", "shape", "data_offsets"}."""


def read_header(file: str | os.PathLike[str]) -> Header:
    """Raises if the file is not whole."""
    path = Path(file)
    size = path.stat().st_size
    broken = MoepressError(f"{path} is damaged: it is not a whole safetensors file (was the download or copy cut off?)")
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= size - 8:
            raise broken
        try:
            header = json.loads(stream.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise broken from None
    if size < 8 + length + end:
        raise broken
    return tensors


def read_headers(files: Iterable[str | os.PathLike[str]]) -> Header:
    """The headers of all safetensors files of a checkpoint in one."""
    merged: Header = {}
    for file in files:
        if str(file).endswith(".safetensors"):
            merged |= read_header(file)
    return merged


def floating_dtypes(header: Header) -> set[torch.dtype]:
    return {DTYPES[entry["dtype"]] for entry in header.values() if entry["dtype"] in DTYPES}
