"""What a compression would give and cost, without doing it (`--dry-run`).

Sizes are counted; time is extrapolated from a trial: one batch through the model, and one alignment.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from moepress.align import Pair, match
from moepress.api import open_source
from moepress.budget import need, tokens_of, within
from moepress.checkpoint.paging import PagedWeights
from moepress.checkpoint.sizes import human_size, predicted_sizes, sizes_of
from moepress.data.batches import calibration_batches
from moepress.decompose.options import shape_so_far
from moepress.fit import (
    average_experts,
    bytes_from,
    check_fit,
    check_gradients,
    check_smaller,
    check_whole,
    needs_gradients,
    needs_whole,
    skipped_layers,
)
from moepress.models.find import find_layers
from moepress.models.inputs import ExpertInputs
from moepress.models.layer import CompactSpec, MoELayer
from moepress.models.walk import CalibrationBatch, walk
from moepress.observe import Statistics, from_gradients
from moepress.pipeline import calibration_dtype, facts_of, planner_of
from moepress.recipe import Recipe

CARRIED = 3
"""Activations of one token that a waiting forward pass holds: residual, normed input, the block's output."""

BACKWARD = 3
"""Forward passes that a forward and backward pass take the time of."""


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
    model: str | os.PathLike[str],
    recipe: Recipe,
    memory: str | None = None,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> Estimate:
    """What would come out, or the refusal that `compress` would begin with. `memory` is what it may take."""
    planner = planner_of(recipe)
    paged, budget = not needs_whole(recipe, planner.needs), bytes_from(memory)
    if not paged:
        check_whole(False, budget is not None, False)
    loaded, tokenizer, _ = open_source(model, None, None, trust_remote_code, revision, paged=paged)
    layers = find_layers(loaded)
    check_fit(recipe, layers)
    check_smaller(recipe, loaded, layers)
    skipped = skipped_layers(recipe, loaded, layers)
    average = average_experts(recipe, loaded, layers, skipped)
    counts = {layer.name: layer.num_experts for layer in layers}
    if not recipe.keeps_all:
        counts = planner.check(facts_of(layers, Statistics(), recipe), skipped, average)
    check_gradients(recipe, planner.needs, loaded, layers)
    form = "redirect" if recipe.router == "redirect" else "rows"
    shrunk = [layer for layer in layers if counts[layer.name] < layer.num_experts]
    specs = {layer.name: CompactSpec(layer.num_experts, counts[layer.name], form) for layer in shrunk}
    if (decomposition := recipe.decomposition()) is not None:
        for layer in (layer for layer in layers if layer.name not in skipped):
            spec = shape_so_far(layer, specs, recipe.capacity)
            specs[layer.name] = replace(spec, factors=decomposition.expected(layer.bank, spec.physical))
    before, after = sizes_of(loaded), predicted_sizes(loaded, specs)
    batches: list[CalibrationBatch] = []
    if recipe.calibration.source:
        shift = getattr(loaded, "prepare_decoder_input_ids_from_labels", None)
        batches = calibration_batches(recipe.calibration, tokenizer, loaded.config, shift=shift)
    streams = 2 if recipe.component("refit.method").reference else 1
    differentiated = bool(from_gradients(planner.needs)) + recipe.component("merge.operator").needs_fisher
    seconds = None
    if batches:
        passes = 0 if recipe.keeps_all else streams + recipe.sequential + BACKWARD * differentiated
        if decomposition is not None:  # moments of the inputs, and gradients
            passes += decomposition.whiten + 3 * (decomposition.ratio < 1)
        seconds = _one_pass(loaded, batches, layers, recipe) * len(batches) * passes
        if not recipe.component("plan.grouping").drops:
            merged_away = sum(spec.experts - spec.physical for spec in specs.values())
            seconds += _one_alignment(layers[0], recipe) * merged_away
    return Estimate(
        before.bytes,
        after.bytes,
        before.parameters,
        after.parameters,
        sum(counts[layer.name] for layer in layers if layer.name not in skipped) / (len(layers) - len(skipped)),
        seconds,
        _memory(loaded, layers, recipe, batches, budget),
    )


def _memory(
    model: PreTrainedModel,
    layers: list[MoELayer],
    recipe: Recipe,
    batches: list[CalibrationBatch],
    budget: int | None,
) -> int:
    """At its peak: of a model that is read layer by layer, or of one that is in memory as a whole, with gradients."""
    weights = layers[0].weights
    if isinstance(weights, PagedWeights):
        found = need(recipe, layers, weights, batches or None)
        if budget is not None:
            within(budget, recipe, found, layers)
            return min(found.total, budget)
        return found.total
    streams = 2 if recipe.component("refit.method").reference else 1
    carried = sum(map(tokens_of, batches)) * layers[0].bank.up_EFD.shape[2] * 4 * CARRIED * streams
    wide = calibration_dtype(recipe, weights.device) is not None and model.dtype.itemsize == 2
    largest = 4 * max(layer.expert_parameters for layer in layers)
    # Gradients of the experts and their sums in float32; with a decomposition, S and its gradients.
    doubled = needs_gradients(recipe, planner_of(recipe).needs) + (recipe.decomposition() is not None)
    gradients = doubled * 2 * 4 * sum(layer.expert_parameters for layer in layers)
    return sizes_of(model).bytes * (2 if wide else 1) + carried + largest + gradients


def _one_pass(model: PreTrainedModel, batches: list[CalibrationBatch], layers: list[MoELayer], recipe: Recipe) -> float:
    """Seconds that one batch takes, once everything is warm."""
    with layers[0].weights.widened(calibration_dtype(recipe, layers[0].weights.device)):
        for _ in range(2):
            start = time.perf_counter()
            for visit in walk(model, batches[:1], layers=layers):
                for _ in visit.batches():
                    pass
    return time.perf_counter() - start


def _one_alignment(layer: MoELayer, recipe: Recipe) -> float:
    solver = recipe.component("align.solver")
    solver.solve(torch.eye(128))  # compiled code is loaded once, not for each alignment
    start = time.perf_counter()
    with torch.no_grad(), layer.weights.at_hand(layer):
        bank = layer.bank
        method = recipe.component("align.method")
        tokens = ExpertInputs(torch.randn(method.tokens, bank.up_EFD.shape[2]).to(bank.up_EFD.device), bank.activation)
        match(method, solver, [Pair(bank.expert(0), bank.expert(1), tokens)])
    return time.perf_counter() - start
