"""What a compression would give and cost, without doing it (`--dry-run`).

Sizes are counted; time is extrapolated from a trial: one batch through the model, and one alignment.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moepress.align import match
from moepress.api import open_source
from moepress.checkpoint.sizes import human_size, sizes_of
from moepress.data.batches import calibration_batches
from moepress.fit import average_experts, check_fit, skipped_layers
from moepress.models.find import find_layers
from moepress.models.layer import MoELayer
from moepress.models.walk import CalibrationBatch, walk
from moepress.recipe import Recipe

CARRIED = 3
"""Activations of one token that a waiting forward pass holds: residual, normed input, the block's output."""


@dataclass(frozen=True)
class Estimate:
    bytes_before: int
    bytes_after: int
    parameters_before: int
    parameters_after: int
    experts: float
    """Kept per layer, on average over the layers that are not skipped."""
    seconds: float | None
    """None where there is no calibration text to try."""
    memory: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def rows(self) -> list[list[str]]:
        return [
            ["parameters", f"{self.parameters_before:,}", f"{self.parameters_after:,}"],
            ["weights", human_size(self.bytes_before), human_size(self.bytes_after)],
        ]

    def note(self) -> str:
        took = "time unknown without calibration text" if self.seconds is None else f"about {self.seconds:.0f} s"
        return f"{self.experts:g} experts a layer; {took}; about {human_size(self.memory)} of memory"


def estimate(
    model: str | os.PathLike[str], recipe: Recipe, *, trust_remote_code: bool = False, revision: str | None = None
) -> Estimate:
    loaded, tokenizer, _ = open_source(model, None, None, trust_remote_code, revision)
    layers = find_layers(loaded)
    check_fit(recipe, layers)
    skipped = skipped_layers(recipe, loaded, layers)
    average = average_experts(recipe, loaded, layers, skipped)
    chosen = [layer for layer in layers if layer.name not in skipped]
    freed = sum(layer.expert_parameters * (1 - average / layer.num_experts) for layer in chosen)
    width = {layer.name: next(iter(layer.bank.tensors().values())).element_size() for layer in chosen}
    freed_bytes = sum(
        layer.expert_parameters * (1 - average / layer.num_experts) * width[layer.name] for layer in chosen
    )
    sizes = sizes_of(loaded)
    batches: list[CalibrationBatch] = []
    if recipe.calibration.source:
        shift = getattr(loaded, "prepare_decoder_input_ids_from_labels", None)
        batches = calibration_batches(recipe.calibration, tokenizer, loaded.config, shift=shift)
    tokens = sum(int(keep.numel()) for batch in batches for keep in batch.keep.values())
    carried = tokens * layers[0].bank.up_EFD.shape[2] * 4 * CARRIED
    largest = max(layer.expert_parameters for layer in layers) * 4
    merged_away = sum(layer.num_experts for layer in chosen) - average * len(chosen)
    seconds = None
    if batches:
        start = time.perf_counter()
        for visit in walk(loaded, batches[:1], layers=layers):
            for _ in visit.batches():
                pass
        seconds = (time.perf_counter() - start) * len(batches) + _one_alignment(chosen[0], recipe) * merged_away
    return Estimate(
        sizes.bytes,
        round(sizes.bytes - freed_bytes),
        sizes.parameters,
        round(sizes.parameters - freed),
        average,
        seconds,
        round(sizes.bytes + carried + largest),
    )


def _one_alignment(layer: MoELayer, recipe: Recipe) -> float:
    bank, solver = layer.bank, recipe.component("align.solver")
    solver.solve(torch.eye(128))  # compiled code is loaded once, not for each alignment
    start = time.perf_counter()
    with torch.no_grad():
        match(recipe.component("align.method"), solver, [(bank.expert(0), bank.expert(1))])
    return time.perf_counter() - start
