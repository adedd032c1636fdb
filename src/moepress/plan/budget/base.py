from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from moepress.errors import MoepressError
from moepress.registry import Registry


@dataclass(frozen=True)
class Limits:
    """What one layer can keep: between `least` and `most` experts, in steps of `step`."""

    least: int
    most: int
    step: int = 1


class Budget(ABC):
    name: ClassVar[str]
    paper: ClassVar[str] = ""
    one_count: ClassVar[bool] = False
    """Whether every layer keeps the same number, as a vanilla checkpoint wants it."""

    @abstractmethod
    def counts(self, scores: list[Tensor], average: float, limits: list[Limits]) -> list[int]:
        """Experts kept per layer, `average` over the given layers. Skipped layers are not among them."""


def check_average(average: float, limits: list[Limits]) -> None:
    least, most = max(limit.least for limit in limits), min(limit.most for limit in limits)
    if average < least:
        raise MoepressError(f"keeping {average:g} experts a layer is too few: at least {least} must stay")
    if average > most:
        raise MoepressError(f"keeping {average:g} experts a layer is too many: a layer has {most}")


BUDGETS: Registry[Budget] = Registry("budget")
