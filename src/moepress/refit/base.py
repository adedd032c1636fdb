from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from moepress.models.probe import Probe
from moepress.models.visit import LayerVisit
from moepress.registry import Registry


class Refit(ABC):
    name: ClassVar[str]
    paper: ClassVar[str] = ""
    visits: ClassVar[bool] = True
    """Whether it needs the layer's calibration inputs."""
    shared: ClassVar[bool] = False
    """Whether it can do with a share of them: what it adds up over all, it adds up over all processes."""

    def suited(self, found: Probe) -> tuple[Refit, str]:
        """What can be done on this model, and a sentence if it is less than was meant. Refuses what cannot."""
        return self, ""

    @property
    def reference(self) -> bool:
        """Whether it needs to know how far the earlier layers have drifted from the original model."""
        return False

    def remember(self, visit: LayerVisit) -> dict[int, Tensor]:
        """Called while the layer is still whole: its outputs (T, D) by batch, for as long as the layer is worked on."""
        return {}

    @abstractmethod
    def fit(self, visit: LayerVisit, whole: dict[int, Tensor]) -> None:
        """Called when the layer has its final shape; changes its weights in place. `whole` is what was remembered."""


REFITS: Registry[Refit] = Registry("refit")
