from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from moepress.registry import Registry


class Merge(ABC):
    name: ClassVar[str]
    paper: ClassVar[str] = ""

    @abstractmethod
    def weights(self, usage: list[float]) -> list[float]:
        """What each member of a group counts, given how often each was used; adds up to 1."""

    @abstractmethod
    def merge(self, members: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
        """One expert out of aligned members."""


MERGES: Registry[Merge] = Registry("merge operator")
