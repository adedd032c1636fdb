from __future__ import annotations

from abc import ABC
from typing import ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from moepress.models.probe import Probe
from moepress.models.visit import CalibrationBatch, LayerVisit
from moepress.plan import LayerPlan
from moepress.registry import Registry


class RouterRefit(ABC):
    name: ClassVar[str]
    paper: ClassVar[str] = ""
    visits: ClassVar[bool] = True
    """Whether it needs the layer's calibration inputs."""
    shared: ClassVar[bool] = False
    """Whether it can do with a share of them: what it adds up over all, it adds up over all processes."""
    rows: ClassVar[bool] = False
    """Whether it is about the rows of experts that were merged, so that a redirect leaves it nothing to do."""

    trains: ClassVar[bool] = False
    """Whether it trains the whole model against the original once all layers are done, instead of fitting each."""

    def check(self, found: Probe) -> None:
        """Refuse a model that this cannot be done to."""
        return None

    def remember(self, visit: LayerVisit) -> dict[int, Tensor]:
        """Called while the layer is still whole: its router's logits (T, E) by batch."""
        return {}

    def fit(self, visit: LayerVisit, plan: LayerPlan, whole: dict[int, Tensor]) -> None:
        """Called when the layer has its final shape, if it `visits`; changes its router in place."""
        raise NotImplementedError

    def train(
        self, model: PreTrainedModel, original: PreTrainedModel, batches: list[CalibrationBatch], seed: int
    ) -> str:
        """Called when all layers are done, if it `trains`. Returns a sentence about what came of it."""
        raise NotImplementedError


ROUTER_REFITS: Registry[RouterRefit] = Registry("router refit")
