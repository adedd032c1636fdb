"""What every statistic is: named fp64 sums over the calibration tokens of one layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moepress.models.layer import ExpertBank, LayerBatch, MoELayer
from moepress.registry import Registry


@dataclass(frozen=True)
class LayerShape:
    """All that a statistic needs to know of a layer before it sees a token."""

    experts: int
    width: int
    hidden_units: int

    @classmethod
    def of(cls, layer: MoELayer) -> LayerShape:
        units, width = layer.adapter.widths(layer.block)
        return cls(layer.num_experts, width, units)


class Statistic(ABC):
    """Sums that add up: over batches, over ranks, over calibration runs. `update` sees only unpadded tokens."""

    name: ClassVar[str]
    runs_experts: ClassVar[bool] = False
    """Whether `update` has to run every expert, which costs as much as the layer or more."""
    sampled: ClassVar[int | None] = None
    """About how many tokens are enough, for what is too dear to be done with all of them."""

    def __init__(self, shape: LayerShape) -> None:
        self.shape = shape
        self.sums = {name: torch.zeros(size, dtype=torch.float64) for name, size in self.sizes(shape).items()}

    @classmethod
    @abstractmethod
    def sizes(cls, shape: LayerShape) -> dict[str, tuple[int, ...]]:
        """The sums by name and their shapes."""

    @classmethod
    def bytes(cls, shape: LayerShape) -> int:
        """What one layer's sums take in memory and in the saved file."""
        return sum(8 * torch.Size(size).numel() for size in cls.sizes(shape).values())

    @abstractmethod
    def update(self, batch: LayerBatch, bank: ExpertBank) -> None: ...

    def add(self, name: str, value: Tensor) -> None:
        """Add one batch's partial sum. Partials are formed per batch and added in batch order: every split of the
        work over machines gives the same bits."""
        self.sums[name] += value.to(device="cpu", dtype=torch.float64)


STATISTICS: Registry[Statistic] = Registry("statistic")
