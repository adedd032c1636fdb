"""Training of the routers alone, as the last stage of a compression."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from moepress.errors import MoepressError
from moepress.models.visit import CalibrationBatch
from moepress.recovery.loop import recover
from moepress.recovery.options import RecoverOptions
from moepress.refit.router import ROUTER_REFITS, RouterRefit


@ROUTER_REFITS.register("distil")
@dataclass(frozen=True)
class Distil(RouterRefit):
    """Train the routers, and nothing else, for the predictions that the original model makes on the calibration text.
    A tenth of the text is held out: the weights that did best on it are kept, be it those from before."""

    steps: int = 200
    lr: float = 1e-3
    batch_size: int = 16

    paper = "Router KD, https://arxiv.org/abs/2603.02217"
    visits = False
    trains = True

    def __post_init__(self) -> None:
        self.options(seed=0)  # refuses what cannot be

    def options(self, seed: int) -> RecoverOptions:
        every = max(1, min(25, self.steps // 8))
        return RecoverOptions(
            steps=self.steps,
            lr=self.lr,
            batch_size=self.batch_size,
            train="router",
            evaluate_every=every,
            seed=seed,
        )

    def train(
        self, model: PreTrainedModel, original: PreTrainedModel, batches: list[CalibrationBatch], seed: int
    ) -> str:
        report = recover(model, original, batches, self.options(seed))
        if not report.held_out:
            raise MoepressError("router distillation needs at least two samples of text, one of them to judge by")
        first, best = report.held_out[0][1], min(loss for _, loss in report.held_out)
        return f"routers distilled: KL to the original on held-out text {first:.4f} before, {best:.4f} after"
