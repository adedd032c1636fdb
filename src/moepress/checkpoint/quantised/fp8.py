"""fp8 with a scale for each block of a matrix, as DeepSeek-V3, Qwen3 and MiniMax-M2 ship it.

Beside `X.weight` (float8_e4m3fn) lies `X.weight_scale_inv`, one number for each block of 128 x 128: the weight is their
product. Blocks at the edges may be smaller. transformers has a quantiser of the same arithmetic (`Fp8Quantize`; the
tests compare with it), but it passes matrices that are no multiple of the block through as they are, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moepress.checkpoint.headers import Header
from moepress.checkpoint.quantised.storage import CHUNK, Packed, Storage, does_not_fit, tensor_of
from moepress.errors import MoepressError

LARGEST = torch.finfo(torch.float8_e4m3fn).max
SCALE = "_scale_inv"
SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")


class BlockFp8(Storage):
    def __init__(self, config: Mapping[str, Any]) -> None:
        block = config.get("weight_block_size")
        if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
            raise MoepressError("its fp8 weights are not in blocks, which moepress does not read")
        if config.get("fmt", "e4m3") != "e4m3":
            raise MoepressError(f"its weights are fp8 of the kind {config['fmt']!r}, and moepress reads e4m3")
        if config.get("activation_scheme", "dynamic") != "dynamic":
            raise MoepressError("its activations have stored scales (activation_scheme), which merging cannot keep")
        self.block = (block[0], block[1])
        self.together = block[0]
        self.powers = config.get("scale_fmt") == "ue8m0"
        self.description = f"fp8 in blocks of {block[0]} x {block[1]}"

    def names(self, name: str) -> dict[str, str]:
        return {"values": name, "scales": name + SCALE}

    def find(self, header: Header) -> dict[str, Packed]:
        found = {}
        for name, entry in header.items():
            if entry["dtype"] != "F8_E4M3":
                continue
            shape = entry["shape"]
            if len(shape) != 2:
                raise MoepressError(f"{name} is fp8 of shape {shape}, and moepress reads matrices only")
            scales = tensor_of(header, name + SCALE, name)
            grid = scales["shape"]
            if grid != [-(-n // b) for n, b in zip(shape, self.block, strict=True)]:
                raise does_not_fit(name, shape, name + SCALE, grid)
            if scales["dtype"] not in SCALE_TYPES:
                raise MoepressError(f"{name + SCALE} is stored as {scales['dtype']}, which moepress does not read")
            found[name] = Packed(name, tuple(shape), self.names(name))
        return found

    def unpack(self, stored: Mapping[str, Tensor]) -> Iterator[tuple[Any, Tensor]]:
        values, scales = stored["values"], stored["scales"].float()
        rows, columns = values.shape
        high, wide = self.block
        step = max(CHUNK // max(columns, 1) // high, 1)
        for start in range(0, len(scales), step):
            place = slice(start * high, min((start + step) * high, rows))
            scale = scales[start : start + step].repeat_interleave(high, 0)[: place.stop - place.start]
            yield place, values[place].float().mul_(scale.repeat_interleave(wide, 1)[:, :columns])

    def pack_rows(self, values: Tensor, like: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """The largest number of each block becomes the largest that fp8 has."""
        rows, columns = values.shape
        high, wide = self.block
        padded = torch.nn.functional.pad(values, (0, -columns % wide, 0, -rows % high))
        blocks = padded.reshape(len(padded) // high, high, -1, wide)
        largest = blocks.abs().amax((1, 3))
        factor = LARGEST / largest.masked_fill_(largest == 0, LARGEST)
        scales = 1 / factor
        if self.powers:
            scales = scales.log2().ceil().exp2()
        scales = scales.to(like["scales"])
        if self.powers or scales.dtype != torch.float32:
            factor = 1 / scales.float()
        fp8 = (blocks * factor[:, None, :, None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return {"values": fp8.reshape(padded.shape)[:rows, :columns].contiguous(), "scales": scales}
