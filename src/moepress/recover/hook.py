"""How something else takes part in training: compression that goes on while a model recovers."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class TrainingHook(Protocol):
    """Called on every process with the number of the step, which starts at 1."""

    def after_backward(self, step: int) -> None:
        """Gradients are complete and not yet clipped."""

    def after_step(self, step: int) -> None:
        """The weights have been updated; they may be changed in place, for instance masked."""

    def finish(self) -> None:
        """Training is over, also when it stopped early; the weights are final after this."""
