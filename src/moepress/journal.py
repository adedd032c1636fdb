"""What survives an interruption: which layers have been observed and which are finished.

Here: nothing, for a model in memory. `checkpoint/job.py` keeps it on disk, together with the finished layers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from moepress.models.layer import CompactSpec, MoELayer
from moepress.observe.statistic import Statistic
from moepress.plan import LayerPlan


@dataclass
class Observed:
    """What the first pass found out about one layer."""

    statistics: dict[str, Statistic]
    score_E: Tensor | None = None
    """Of a saliency that needs the visit itself."""


@dataclass
class Finished:
    """How one layer came about."""

    plan: LayerPlan
    spec: CompactSpec | None = None
    """None: it stays whole."""
    statistics: dict[str, Statistic] = field(default_factory=dict)
    """Of a sequential run, which observes a layer and rebuilds it at once."""
    gap: float | None = None
    """The worst certified alignment gap."""
    picked: str | None = None
    output_error: float | None = None
    """Relative squared error of the layer's output on its inputs, where those were at hand."""
    similarity_EE: Tensor | None = None
    """What its experts were grouped by."""
    solved: Counter[str] = field(default_factory=Counter)


class Journal:
    """Of a run that leaves nothing behind when it is interrupted."""

    def observed(self, layer: MoELayer) -> Observed | None:
        """What an interrupted run has found out."""
        return None

    def note(self, layer: MoELayer, found: Observed) -> None:
        """A layer has been observed."""

    def finished(self, layer: MoELayer) -> Finished | None:
        """How an interrupted run has finished this layer."""
        return None

    def restore(self, layer: MoELayer, done: Finished) -> None:
        """Give a whole layer the shape and the weights with which it was finished."""

    def finish(self, layer: MoELayer, done: Finished) -> None:
        """A layer has its final weights; whoever wants them on disk takes them now. Where several processes work
        together, all have come to this layer."""

    def finish_alone(self, layer: MoELayer, done: Finished) -> None:
        """The same where each process works on layers of its own."""
        self.finish(layer, done)

    def together(self, layers: list[MoELayer], done: dict[str, Finished]) -> dict[str, Finished]:
        """By name, the layers that this process has finished alone, and those of the others."""
        return done
