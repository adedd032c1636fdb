from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from moepress.plan.facts import LayerFacts
from moepress.registry import Registry


class Guard(ABC):
    name: ClassVar[str]
    paper: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def alone(self, facts: LayerFacts) -> frozenset[int]:
        """Experts that are neither dropped nor merged with others."""


GUARDS: Registry[Guard] = Registry("guard")
