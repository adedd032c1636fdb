"""Pruning S while the model trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moepress.decompose.importance import Importance, factored_matrices, strongest_slices
from moepress.decompose.layer import prune_layer
from moepress.decompose.schedule import Schedule
from moepress.errors import MoepressError
from moepress.hook import TrainingHook
from moepress.models.find import find_layers
from moepress.models.layer import CompactSpec
from moepress.runtime.factors import FactoredMatrix


class GradualPruning(TrainingHook):
    """Sets the least important columns (rows) of S to zero, more of them as the schedule goes on; `remove` then takes
    them out of the model. A column may come back, from zero, until the schedule's end; which ones are left then is
    final. They are set to zero after every step, so that neither momentum nor a master copy of the weights in another
    precision brings them back.

    Every process decides alike, since gradients are the same everywhere; sharded parameters are not supported.
    """

    def __init__(self, model: nn.Module, schedule: Schedule, importance: Importance | None = None) -> None:
        self.model = model
        self.schedule = schedule
        self.importance = importance or Importance()
        self.scores: dict[str, Tensor] = {}
        self.kept: dict[str, Tensor] = {}
        self.seen = 0
        matrices = factored_matrices(model)
        whole = sum(matrix.experts * matrix.choices for matrix in matrices.values())
        if sum(len(matrix.index) for matrix in matrices.values()) < whole:
            raise MoepressError("S has been pruned already: decompose the model with decompose.ratio=1 to train it")

    @torch.no_grad()
    def after_backward(self, step: int) -> None:
        if step > self.schedule.end:
            return
        now = {name: self.importance.scores(matrix) for name, matrix in factored_matrices(self.model).items()}
        if not all(bool(torch.isfinite(scores).all()) for scores in now.values()):
            return  # a step that mixed precision is about to skip
        self.seen += 1
        self.scores = {n: self.importance.smoothed(self.scores.get(n), scores, self.seen) for n, scores in now.items()}

    def after_step(self, step: int) -> None:
        if self.schedule.start < step <= self.schedule.end:
            self._choose(self.schedule(step))
        self._mask()

    def settled(self, step: int) -> bool:
        return step >= self.schedule.end

    def finish(self) -> None:
        """Down to the final share, also when training stopped before its time."""
        if self._share() > self.schedule.final or not self.kept:
            self._choose(self.schedule.final)
        self._mask()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "scores": dict(self.scores), "kept": dict(self.kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        here = factored_matrices(self.model)
        for part in ("scores", "kept"):
            if {name: len(each) for name, each in state[part].items()} not in (
                {},
                {n: len(m.index) for n, m in here.items()},
            ):
                raise MoepressError("the state of the pruning is that of another model")
        devices = {name: matrix.index.device for name, matrix in here.items()}
        self.seen = state["seen"]
        self.scores = {name: each.to(devices[name]) for name, each in state["scores"].items()}
        self.kept = {name: each.to(devices[name]) for name, each in state["kept"].items()}

    def remove(self, specs: dict[str, CompactSpec]) -> dict[str, CompactSpec]:
        """Take what is zero out of the model: the same function with smaller tensors. `specs` are those of the model as
        it was trained; returns the new ones, to be given to `attach` or `save_compact`."""
        self.finish()
        return remove_slices(self.model, specs, self.kept)

    def _lengths(self, matrices: dict[str, FactoredMatrix]) -> dict[str, int]:
        return {name: matrix.packed_Px.shape[1] for name, matrix in matrices.items()}

    def _share(self) -> float:
        lengths = self._lengths(factored_matrices(self.model))
        left = sum(int(kept.sum()) * lengths[name] for name, kept in self.kept.items())
        return left / max(1, sum(len(kept) * lengths[name] for name, kept in self.kept.items()))

    def _choose(self, share: float) -> None:
        matrices = factored_matrices(self.model)
        if not self.scores:
            raise MoepressError("no gradient has been seen: there is nothing to tell which columns of S matter")
        self.kept = strongest_slices(self.scores, self._lengths(matrices), share)

    @torch.no_grad()
    def _mask(self) -> None:
        if not self.kept:
            return
        for name, matrix in factored_matrices(self.model).items():
            matrix.packed_Px.index_fill_(0, matrix.sparse_rows()[~self.kept[name]], 0)


def remove_slices(model: nn.Module, specs: dict[str, CompactSpec], kept: dict[str, Tensor]) -> dict[str, CompactSpec]:
    """Prune every decomposed layer to the columns (rows) that are kept, by matrix; returns all specs, new ones among
    them."""
    pruned = dict(specs)
    for layer in find_layers(model):
        own = {name.rpartition(":")[2]: each for name, each in kept.items() if name.rpartition(":")[0] == layer.name}
        if own:
            pruned[layer.name] = prune_layer(layer, specs[layer.name], own)
    return pruned
