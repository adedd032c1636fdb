"""How much of S is left at each step of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from moepress.errors import MoepressError
from moepress.registry import did_you_mean

Shape = Literal["cubic", "quadratic", "linear"]
POWERS: dict[str, int] = {"cubic": 3, "quadratic": 2, "linear": 1}
WARMUP, COOLDOWN, STEPS = 400, 1600, 10000
"""The paper's T_i, T_f and T."""


@dataclass(frozen=True)
class Schedule:
    """All of S until the warm-up is over, then less and less, and `final` from the cool-down on. Without other numbers
    warm-up and cool-down are the paper's, as shares of fewer steps where there are fewer.

    The paper prints t − T_i − T_f in the numerator, which would begin above 1; its code has t − T_i, as here.
    """

    final: float
    steps: int
    shape: Shape = "cubic"
    warmup: int | None = None
    cooldown: int | None = None

    def __post_init__(self) -> None:
        if self.shape not in POWERS:
            raise MoepressError(
                f"unknown schedule {self.shape!r}: {did_you_mean(str(self.shape), list(get_args(Shape)))}"
            )
        if not 0 <= self.final <= 1:
            raise MoepressError(f"the share of S that stays must be from 0 to 1, not {self.final}")
        if min(self.start, self.steps - self.end) < 0 or self.start >= self.end:
            raise MoepressError(
                f"a warm-up of {self.start} steps and a cool-down of {self.steps - self.end} leave no step of "
                f"{self.steps} to prune in"
            )

    @property
    def start(self) -> int:
        """The last step that has all of S."""
        return self._share(self.warmup, WARMUP)

    @property
    def end(self) -> int:
        """The first step that has no more than the final share."""
        return self.steps - self._share(self.cooldown, COOLDOWN)

    def _share(self, given: int | None, usual: int) -> int:
        return given if given is not None else min(usual, usual * self.steps // STEPS)

    def __call__(self, step: int) -> float:
        if step <= self.start:
            return 1.0
        if step >= self.end:
            return self.final
        left = 1 - (step - self.start) / (self.end - self.start)
        return self.final + (1 - self.final) * left ** POWERS[self.shape]
