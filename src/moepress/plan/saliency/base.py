from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from moepress.plan.facts import LayerFacts
from moepress.registry import Registry


class Saliency(ABC):
    name: ClassVar[str]
    paper: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    needs_visit: ClassVar[bool] = False
    """Whether it tries things out on the layer's calibration inputs, so that it works layer after layer only."""
    shared: ClassVar[bool] = False
    """Whether that works where each of several processes has a share of the inputs: it asks with `visit.each`."""

    @abstractmethod
    def score(self, facts: LayerFacts) -> Tensor:
        """(E,) float64, not negative, larger is more important; comparable within the layer."""


SALIENCIES: Registry[Saliency] = Registry("saliency")
