from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from moepress.models.inputs import ExpertInputs
from moepress.registry import Registry

Expert = dict[str, Tensor]
Weighting = Literal["uniform", "frequency"]


@dataclass(frozen=True)
class Members:
    """A group that becomes one expert, its leader first."""

    experts: list[Expert]
    """In the unit order of the leader, where the operator wants them aligned."""
    weights: list[float]
    """What each counts; they add up to 1."""
    inputs: ExpertInputs | None = None
    """Tokens that the group serves, for operators that need a visit."""
    fisher: list[Expert] | None = None
    """The diagonal Fisher information of every weight, for operators that need it."""


class Merge(ABC):
    name: ClassVar[str]
    paper: ClassVar[str] = ""
    weigh_by: ClassVar[Literal["usage", "score"]] = "usage"
    """What `weights` is given of each member: how often it was used, or what the saliency says of it."""
    aligns: ClassVar[bool] = True
    """Whether it wants aligned members. Otherwise it matches hidden units in its own way."""
    needs_visit: ClassVar[bool] = False
    """Whether it looks at calibration tokens (at most `tokens` of each group), not at weights alone."""
    needs_fisher: ClassVar[bool] = False
    """Whether it needs a pass with gradients before anything is merged."""
    tokens: int = 0

    @abstractmethod
    def weights(self, usage: list[float]) -> list[float]:
        """What each member of a group counts, given how often each was used (or its score); adds up to 1."""

    @abstractmethod
    def merge(self, group: Members) -> Expert:
        """One expert out of several."""


def shares(amounts: list[float], weighting: Weighting = "frequency") -> list[float]:
    """Each one's part of the total; equal ones of nothing, or if all are to count the same."""
    total = sum(amounts)
    if weighting == "uniform" or total <= 0:
        return [1 / len(amounts)] * len(amounts)
    return [amount / total for amount in amounts]


MERGES: Registry[Merge] = Registry("merge operator")
