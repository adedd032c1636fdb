from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from torch import Tensor

from moepress.registry import Registry


class Merge(ABC):
    name: ClassVar[str]
    paper: ClassVar[str] = ""
    weigh_by: ClassVar[Literal["usage", "score"]] = "usage"
    """What `weights` is given of each member: how often it was used, or what the saliency says of it."""

    @abstractmethod
    def weights(self, usage: list[float]) -> list[float]:
        """What each member of a group counts, given how often each was used (or its score); adds up to 1."""

    @abstractmethod
    def merge(self, members: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
        """One expert out of aligned members."""


MERGES: Registry[Merge] = Registry("merge operator")
