from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from moepress.models.probe import Probe
from moepress.models.visit import LayerVisit
from moepress.plan import LayerPlan
from moepress.registry import Registry


class RouterRefit(ABC):
    name: ClassVar[str]
    paper: ClassVar[str] = ""
    visits: ClassVar[bool] = True
    """Whether it needs the layer's calibration inputs."""
    rows: ClassVar[bool] = False
    """Whether it is about the rows of experts that were merged, so that a redirect leaves it nothing to do."""

    def check(self, found: Probe) -> None:
        """Refuse a model that this cannot be done to."""
        return None

    @abstractmethod
    def remember(self, visit: LayerVisit) -> dict[int, Tensor]:
        """Called while the layer is still whole: its router's logits (T, E) by batch."""

    @abstractmethod
    def fit(self, visit: LayerVisit, plan: LayerPlan, whole: dict[int, Tensor]) -> None:
        """Called when the layer has its final shape; changes its router in place."""


ROUTER_REFITS: Registry[RouterRefit] = Registry("router refit")
