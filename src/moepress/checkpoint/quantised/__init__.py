"""Quantised checkpoints: read as if they were not, and written as they were.

One file a format. `files.py` shows the rest of moepress the tensors that the model knows; what nothing has changed is
copied as it lies in the files (`checkpoint/keeping.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moepress.checkpoint.quantised.fp8 import BlockFp8
from moepress.checkpoint.quantised.integers import PackedIntegers
from moepress.checkpoint.quantised.mxfp4 import Mxfp4
from moepress.checkpoint.quantised.storage import Packed, Storage
from moepress.errors import MoepressError

READ = "fp8 in blocks (DeepSeek-V3, Qwen3), MXFP4 (gpt-oss) and packed integers (compressed-tensors)"


def storage_of(config: Mapping[str, Any], source: object) -> Storage:
    """The format that config.json describes. Raises if moepress cannot read it."""
    method = config.get("quant_method")
    kind = f"{method} ({config['format']})" if method == "compressed-tensors" and config.get("format") else method
    try:
        if method == "fp8":
            return BlockFp8(config)
        if method == "mxfp4":
            return Mxfp4()
        if method == "compressed-tensors" and config.get("format") == "pack-quantized":
            return PackedIntegers(config)
    except MoepressError as error:
        raise MoepressError(
            f"{source} is quantised with {kind}, and {error}: give the checkpoint in its original precision"
        ) from None
    raise MoepressError(
        f"{source} is quantised with {kind}, and of quantised checkpoints moepress reads {READ}: give the checkpoint "
        "in its original precision"
    )


__all__ = ["READ", "Packed", "Storage", "storage_of"]
