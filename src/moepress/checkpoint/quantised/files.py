"""A quantised checkpoint's files as those of its twin in full precision: tensors under the names that the model knows,
unpacked while they are read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moepress.checkpoint.files import TensorFiles
from moepress.checkpoint.headers import NAMES, Header
from moepress.checkpoint.quantised.storage import Packed, Storage
from moepress.errors import MoepressError

UNREAD = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I8", "U8", "I32")
"""Types of which no tensor of a language model is that is not quantised."""
EXPERTS = ".experts."


class QuantisedFiles(TensorFiles):
    def __init__(
        self, header: Header, storage: Storage, dtype: torch.dtype, described: Mapping[str, Any] | None = None
    ) -> None:
        """`dtype`: that of the unpacked weights. `described`: what config.json says, in its place there."""
        self.storage, self.unpacked, self.described = storage, dtype, described or {}
        self.description = storage.description
        self.packed = storage.find(header)
        self._raw = TensorFiles(header)
        super().__init__(self._without_quantisation(header))

    def _without_quantisation(self, header: Header) -> Header:
        by_values = {packed.stored["values"]: packed for packed in self.packed.values()}
        parts = {name for packed in self.packed.values() for name in packed.stored.values()}
        seen: Header = {}
        for name, entry in header.items():
            if name in by_values:
                packed = by_values[name]
                size = torch.Size(packed.shape).numel() * self.unpacked.itemsize
                new = {"dtype": NAMES[self.unpacked], "shape": list(packed.shape), "data_offsets": [0, size]}
                seen[packed.name] = entry | new
            elif name not in parts:
                seen[name] = entry
        return seen

    @property
    def raw(self) -> TensorFiles:
        return self._raw

    def beside(self, header: Header) -> TensorFiles:
        return QuantisedFiles(header, self.storage, self.unpacked)

    def stored(self, name: str) -> Mapping[str, str]:
        return self.packed[name].stored if name in self.packed else super().stored(name)

    def stored_as(self, name: str, new: str) -> Mapping[str, str]:
        return self.storage.names(new) if name in self.packed else super().stored_as(name, new)

    def is_packed(self, name: str) -> bool:
        return name in self.packed

    def has_rows(self, name: str) -> bool:
        return self.storage.rows if name in self.packed else super().has_rows(name)

    def pack(self, values: Tensor, like: str) -> dict[str, Tensor]:
        if like not in self.packed:
            return super().pack(values, like)
        types = {role: self._raw.dtype(name) for role, name in self.packed[like].stored.items()}
        if not self.storage.rows or values.dim() < 3:
            return self.storage.pack(values.cpu(), types)
        rows = [self.storage.pack(row.cpu(), types) for row in values]
        return {role: torch.stack([row[role] for row in rows]) for role in types}

    def describe(self, config: Path, again: int) -> list[str]:
        content = json.loads(config.read_text(encoding="utf-8"))
        for name, value in self.described.items():
            content[name] = content.get(name, {}) | value if isinstance(value, dict) else value
        config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        what = f"{again} matrices were quantised again" if again else "none had to be quantised again"
        return [f"the weights are stored as in the original, {self.storage.description}; {what}"]

    # ---- reading ------------------------------------------------------------------------------------------------

    def read(self, name: str) -> Tensor:
        out = torch.empty(self.header[name]["shape"], dtype=self.dtype(name))
        self.read_into(name, out)
        return out

    def read_row(self, name: str, row: int) -> Tensor:
        if name not in self.packed:
            return super().read_row(name, row)
        packed = self.packed[name]
        out = torch.empty(packed.shape[1:], dtype=self.unpacked)
        for place, values in self.storage.unpack(
            {role: self._raw.read_row(n, row) for role, n in packed.stored.items()}
        ):
            out[place] = values
        return out

    def read_into(self, name: str, out: Tensor) -> None:
        if name not in self.packed:
            super().read_into(name, out)
            return
        for place, values in self._pieces(self.packed[name]):
            out[place] = values

    def copy_to(self, name: str, place: Tensor, stored: torch.dtype) -> None:
        if name not in self.packed:
            super().copy_to(name, place, stored)
            return
        for index, values in self._pieces(self.packed[name]):
            place[index].copy_(values.to(self.unpacked).to(stored))

    def _pieces(self, packed: Packed) -> Iterator[tuple[Any, Tensor]]:
        if not self.storage.rows:
            yield from self.storage.unpack({role: self._raw.read(name) for role, name in packed.stored.items()})
            return
        for row in range(packed.shape[0]):
            stored = {role: self._raw.read_row(name, row) for role, name in packed.stored.items()}
            for place, values in self.storage.unpack(stored):
                yield (row, *place), values

    def close(self) -> None:
        self._raw.close()
        super().close()

    # ---- before anything is read --------------------------------------------------------------------------------

    def check(self, used: set[str]) -> None:
        """Raise if the model is made of tensors of a type that it cannot have, or does not know what its experts hold.
        `used`: names of tensors that make the model."""
        layers = {name.partition(EXPERTS)[0] for name in used if EXPERTS in name}
        storage = self.description
        for name, entry in self.header.items():
            if name in used and entry["dtype"] in UNREAD:
                raise MoepressError(f"{name} is stored as {entry['dtype']}, which is not {storage}")
            if name not in used and name.partition(EXPERTS)[0] in layers:
                raise MoepressError(f"moepress does not know what {name} is: it is no part of {storage}")
        for layer in layers:
            own = [name for name in used if name.startswith(layer + EXPERTS) and self._is_matrix(name)]
            if len({name in self.packed for name in own}) > 1:
                raise MoepressError(f"some of the experts in {layer} are quantised and others are not")

    def _is_matrix(self, name: str) -> bool:
        return len(self.header[name]["shape"]) > 1 and "bias" not in name
