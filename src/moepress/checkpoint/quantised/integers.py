"""Integers of four or eight bits with a scale for every few numbers of a row: compressed-tensors' `pack-quantized`,
as Kimi-K2 and llm-compressor write it.

`X.weight_packed` holds, in words of 32 bits from the lowest bits on, the integers plus half of their range;
`X.weight_scale` one scale for each group of a row; `X.weight_shape` the shape of the matrix. The package
compressed-tensors reads and writes the same (the tests compare with it); it would be a dependency for a few lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moepress.checkpoint.headers import Header
from moepress.checkpoint.quantised.storage import CHUNK, Packed, Storage, does_not_fit, tensor_of
from moepress.errors import MoepressError

PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
UNKNOWN = ("_zero_point", "_g_idx")


class PackedIntegers(Storage):
    def __init__(self, config: Mapping[str, Any]) -> None:
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise MoepressError("its quantisation has no config_groups")
        kinds = {self._kind(group) for group in groups.values()}
        if len(kinds) > 1:
            raise MoepressError("its layers are quantised in several ways, and moepress reads one")
        ((self.bits, self.group),) = kinds
        self.description = f"int{self.bits} in groups of {self.group}" if self.group else f"int{self.bits} by row"

    def _kind(self, group: Any) -> tuple[int, int | None]:
        """Bits, and numbers that share a scale (None: a row)."""
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or group.get("input_activations") or group.get("output_activations"):
            raise MoepressError("its activations are quantised, too, and moepress reads weights only")
        known = weights.get("type") == "int" and weights.get("num_bits") in (4, 8) and weights.get("symmetric") is True
        strategy, size = weights.get("strategy"), weights.get("group_size")
        if strategy == "group" and known and type(size) is int and size > 0:
            return weights["num_bits"], size
        if strategy == "channel" and known:
            return weights["num_bits"], None
        raise MoepressError("its integers are not symmetric ones of 4 or 8 bits in groups or by row")

    def names(self, name: str) -> dict[str, str]:
        return {"values": name + PACKED, "scales": name + SCALE, "shape": name + SHAPE}

    def find(self, header: Header) -> dict[str, Packed]:
        found = {}
        for stored, entry in header.items():
            if stored.endswith(tuple(f".weight{word}" for word in UNKNOWN)):
                raise MoepressError(f"the checkpoint holds {stored}: moepress reads symmetric integers in their order")
            name = stored.removesuffix(PACKED)
            if name == stored or not name.endswith(".weight"):
                continue
            names = self.names(name)
            scales = tensor_of(header, names["scales"], stored)
            shape = [entry["shape"][0], entry["shape"][-1] * 32 // self.bits]
            groups = 1 if self.group is None else shape[1] // self.group
            whole = self.group is None or shape[1] % self.group == 0
            if (
                len(entry["shape"]) != 2
                or entry["dtype"] != "I32"
                or not whole
                or scales["shape"] != [shape[0], groups]
            ):
                raise does_not_fit(stored, entry["shape"], names["scales"], scales["shape"])
            tensor_of(header, names["shape"], stored)
            found[name] = Packed(name, (shape[0], shape[1]), names)
        return found

    def unpack(self, stored: Mapping[str, Tensor]) -> Iterator[tuple[Any, Tensor]]:
        words, scales = stored["values"], stored["scales"]
        shift = torch.arange(0, 32, self.bits, dtype=torch.int32)
        step = max(CHUNK // max(words.shape[1] * len(shift), 1), 1)
        for start in range(0, len(words), step):
            place = slice(start, start + step)
            numbers = ((words[place, :, None] >> shift) & (2**self.bits - 1)).flatten(1) - 2 ** (self.bits - 1)
            grouped = numbers.float().unflatten(1, (scales.shape[1], -1))
            yield place, (grouped * scales[place, :, None].float()).flatten(1)

    def pack(self, values: Tensor, like: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        return super().pack(values, like) | {"shape": torch.tensor(values.shape, dtype=like["shape"])}

    def pack_rows(self, values: Tensor, like: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Rounded to the nearest of the steps that span each group from end to end."""
        half = 2 ** (self.bits - 1)
        grouped = values.unflatten(1, (1, -1) if self.group is None else (-1, self.group))
        scales = (grouped.abs().amax(-1) / (half - 0.5)).to(like["scales"])
        scales = scales.masked_fill_(scales == 0, 1)
        numbers = (grouped / scales[..., None].float()).round().clamp_(-half, half - 1).flatten(1).long() + half
        shift = torch.arange(0, 32, self.bits)
        words = (numbers.unflatten(1, (-1, len(shift))) << shift).sum(-1)
        return {"values": words.to(torch.int32), "scales": scales}
