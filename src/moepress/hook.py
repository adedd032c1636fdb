"""How something else takes part in training: compression that goes on while a model recovers."""

from __future__ import annotations

from typing import Any


class TrainingHook:
    """Called on every process with the number of the step, which starts at 1. A subclass overrides what it needs.

    Parameters are to be looked up in their modules at each call: sharded training replaces the objects.
    """

    def after_backward(self, step: int) -> None:
        """Gradients are complete and not yet clipped."""

    def after_step(self, step: int) -> None:
        """The weights have been updated; they may be changed in place, for instance masked."""

    def settled(self, step: int) -> bool:
        """Whether nothing more will be taken away from the model after this step. Only from then on are the best
        weights looked for: earlier ones belong to a larger model."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """What the hook must know to go on after a restart, beside the weights: masks, averages."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; called before the first step after a restart."""

    def finish(self) -> None:
        """Training is over, also when it stopped early; the weights are final after this."""
