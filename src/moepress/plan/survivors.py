"""Experts of one layer that are taken away by how little they are used, a few at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Survivors:
    """Who is left. Usage is a moving average of shares, since it changes with everyone who goes."""

    experts: int
    keep: int
    router_groups: int = 1
    """Each of these blocks of experts keeps equally many, as group-limited routers need."""
    smoothing: float = 0.6
    """What the average so far counts when new usage comes in."""
    share_E: Tensor | None = None
    gone: list[int] = field(default_factory=list)
    """In the order in which they went."""
    score_E: Tensor = field(default_factory=lambda: torch.zeros(0))
    """The share with which each went, never less than that of those before it."""

    def __post_init__(self) -> None:
        self.score_E = torch.zeros(self.experts, dtype=torch.float64)

    @property
    def left(self) -> list[int]:
        return [e for e in range(self.experts) if e not in self.gone]

    @property
    def done(self) -> bool:
        return len(self.gone) == self.experts - self.keep

    def see(self, count_E: Tensor) -> None:
        """How often each expert was chosen since the last time."""
        total = count_E.sum()
        if total > 0:
            now_E = count_E.double().cpu() / total.double().cpu()
            old_E = now_E if self.share_E is None else self.share_E
            self.share_E = self.smoothing * old_E + (1 - self.smoothing) * now_E

    def prune(self, threshold: float) -> None:
        """Who has less than `threshold` of an equal share goes, but never more than may."""
        share_E = self._shares()
        limit = threshold / len(self.left)
        for e in sorted(self.left, key=lambda e: (float(share_E[e]), -e)):
            if share_E[e] < limit and self._spare(e):
                self._take(e)

    def force(self) -> None:
        """Down to what is kept, the least used first."""
        share_E = self._shares()
        for e in sorted(self.left, key=lambda e: (float(share_E[e]), -e)):
            if self._spare(e):
                self._take(e)

    def scores(self) -> Tensor:
        """(E,) higher for who goes later, highest for those who stay."""
        score_E, share_E = self.score_E.clone(), self._shares()
        level = float(score_E.max())
        for e in self.left:
            score_E[e] = level + float(share_E[e])
        return score_E

    def state(self) -> dict[str, Any]:
        return {"share": self._shares(), "gone": list(self.gone), "score": self.score_E}

    def restore(self, state: dict[str, Any]) -> None:
        self.share_E, self.gone, self.score_E = state["share"], list(state["gone"]), state["score"]

    def _shares(self) -> Tensor:
        return torch.zeros(self.experts, dtype=torch.float64) if self.share_E is None else self.share_E

    def _spare(self, e: int) -> bool:
        """Whether the expert's router group has more left than it must keep."""
        size = self.experts // self.router_groups
        block = range(e // size * size, e // size * size + size)
        return sum(other not in self.gone for other in block) > self.keep // self.router_groups

    def _take(self, e: int) -> None:
        self.score_E[e] = max(float(self.score_E.max()), float(self._shares()[e]))
        self.gone.append(e)
