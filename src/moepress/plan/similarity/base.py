from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from moepress.plan.facts import LayerFacts
from moepress.registry import Registry


class Similarity(ABC):
    name: ClassVar[str]
    paper: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def matrix(self, facts: LayerFacts) -> Tensor:
        """(E, E) float64, symmetric, larger is more alike."""


SIMILARITIES: Registry[Similarity] = Registry("similarity")
