"""What a way of storing quantised weights has to say about itself.

`values` and `scales` are roles: which tensor of the files plays them differs from format to format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moepress.checkpoint.headers import Header
from moepress.errors import MoepressError

CHUNK = 1 << 22
"""Numbers that are unpacked at a time: what is in memory beside the tensor itself is a few times as many bytes."""
PIECE = 1 << 20
"""Numbers that are packed at a time, which takes more."""


@dataclass(frozen=True)
class Packed:
    """A tensor of the model, and the tensors of the files that it is made of."""

    name: str
    shape: tuple[int, ...]
    stored: Mapping[str, str]
    """Role -> name in the files."""


class Storage(ABC):
    """One format. It knows its settings from config.json."""

    description: str
    """For people."""
    together: int = 1
    """So many rows share scales."""
    rows: ClassVar[bool] = False
    """Whether a tensor holds all experts of a layer, each apart from the others along the first axis."""

    @abstractmethod
    def find(self, header: Header) -> dict[str, Packed]:
        """The quantised tensors by the name that the model knows. Raises where parts are missing or do not fit."""

    @abstractmethod
    def names(self, name: str) -> dict[str, str]:
        """Under which names a tensor of the model is stored, by role."""

    @abstractmethod
    def unpack(self, stored: Mapping[str, Tensor]) -> Iterator[tuple[Any, Tensor]]:
        """The values in float32, a piece at a time, each with its place (an index) in the tensor."""

    def pack(self, values: Tensor, like: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Quantise a matrix, some rows at a time; scales are of the type that those of the original have."""
        step = max(PIECE // max(values.shape[1], 1) // self.together, 1) * self.together
        parts = [self.pack_rows(rows.float(), like) for rows in values.split(step)]
        return {role: torch.cat([part[role] for part in parts]) for role in parts[0]}

    @abstractmethod
    def pack_rows(self, values: Tensor, like: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """The same for some of its rows."""


def tensor_of(header: Header, name: str, because: str) -> dict[str, Any]:
    if name not in header:
        raise MoepressError(f"the checkpoint is incomplete: {name} is missing, which goes with {because}")
    return header[name]


def does_not_fit(name: str, shape: object, other: str, its: object) -> MoepressError:
    return MoepressError(f"the checkpoint is damaged: {name} of shape {shape} does not go with {other} of shape {its}")
