"""How much memory a streamed compression takes at its peak, from shapes alone, and whether that is within a budget.

The counts are upper bounds of what the stages hold at the same time; `moepress bench memory` measures how far the peak
stays below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from moepress.checkpoint.paging import PagedWeights
from moepress.checkpoint.sizes import human_size
from moepress.errors import MoepressError
from moepress.fit import parse_size
from moepress.models.layer import MoELayer
from moepress.models.visit import CalibrationBatch
from moepress.observe import STATISTICS
from moepress.pipeline import calibration_dtype, planner_of
from moepress.rebuild import tokens_wanted
from moepress.recipe import Recipe

CARRIED = 4
"""Activations of one token that a waiting forward pass holds: residual, normed input, the block's input and output."""
SLACK = 200 * 10**6
"""Temporary values of a forward pass, buffers, what the allocator keeps."""


@dataclass(frozen=True)
class Need:
    """Bytes."""

    process: int
    """Of the program itself."""
    weights: int
    activations: int
    alignment: int

    @property
    def total(self) -> int:
        return self.process + self.weights + self.activations + self.alignment + SLACK


def need(recipe: Recipe, layers: list[MoELayer], weights: PagedWeights, batches: list[CalibrationBatch] | None) -> Need:
    wide = calibration_dtype(recipe, weights.device) if batches is not None else None
    width = max(layer.adapter.widths(layer.block)[1] for layer in layers)
    refit, router = recipe.component("refit.method"), recipe.component("refit.router")
    visits = recipe.sequential or refit.visits or router.visits or bool(tokens_wanted(recipe))
    stored = max(weights.bytes_of(weights.targets(layer.name), None) for layer in layers)
    widened = max(weights.bytes_of(weights.targets(layer.name), wide) for layer in layers)
    runs = any(STATISTICS.get(name).runs_experts for name in planner_of(recipe).needs)
    # The layer, a copy of its experts in canonical form, what they are merged into, and copies that are tried out.
    held = 4 * widened if visits else max((2 if runs else 1) * widened if batches else 0, 3 * stored)
    tokens = sum(keep.numel() for batch in batches or [] for keep in batch.keep.values())
    streams = 2 if refit.reference else 1
    merges = not recipe.component("plan.grouping").drops and recipe.component("align.method").name != "none"
    units = max(layer.adapter.widths(layer.block)[0] for layer in layers)
    alignment = max(parse_size(recipe.align.memory), 4 * units**2) if merges else 0
    return Need(
        resident_memory(),
        held + weights.around(layers, wide),
        tokens * width * 4 * CARRIED * streams,
        min(alignment, 4 * units**2 * max(layer.num_experts for layer in layers)),
    )


def within(budget: int, recipe: Recipe, found: Need, layers: list[MoELayer]) -> Recipe:
    """The recipe that keeps the budget: alignments are solved fewer at a time where that helps."""
    one = 4 * max(layer.adapter.widths(layer.block)[0] for layer in layers) ** 2 if found.alignment else 0
    least = found.total - found.alignment + one
    if least > budget:
        raise MoepressError(
            f"this needs about {human_size(math.ceil(least))} of memory and may use {human_size(budget)}: "
            f"{human_size(found.weights)} for weights, {human_size(found.activations)} for calibration text, "
            f"{human_size(found.process)} for the program; give more (--memory), or fewer samples"
        )
    if found.total <= budget:
        return recipe
    return recipe.model_copy(
        update={"align": recipe.align.model_copy(update={"memory": str(budget - found.total + found.alignment)})}
    )


def resident_memory() -> int:
    """Of this process, now."""
    status = Path("/proc/self/statm")
    if not status.exists():
        return 10**9
    import resource

    return int(status.read_text().split()[1]) * resource.getpagesize()
