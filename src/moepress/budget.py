"""How much memory a streamed compression takes at its peak, from shapes alone, and how a budget can be kept.

The counts are upper bounds of what the stages hold at the same time; `moepress bench memory` measures how far the peak
stays below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from moepress.checkpoint.paging import PagedWeights
from moepress.checkpoint.sizes import human_size
from moepress.errors import MoepressError
from moepress.fit import parse_size
from moepress.models.layer import MoELayer
from moepress.models.visit import CalibrationBatch
from moepress.observe import STATISTICS
from moepress.observe.statistic import LayerShape
from moepress.pipeline import calibration_dtype, planner_of
from moepress.plan.saliency.elimination import Elimination
from moepress.rebuild import tokens_wanted
from moepress.recipe import Recipe
from moepress.refit import Refit
from moepress.refit.least_squares import HELD, LeastSquares

WAITING, FITTED, FOLLOWED = 5, 9, 14
"""Vectors of the model's width that there are of each token. Of a waiting forward pass: residual stream, normed input,
the block's input and output. With a refit also what the experts saw and said and what is missing, twice; where the
original model is followed, its forward pass and the drift."""
PASSING = 12
"""Of each token of the batch that is on its way."""
SLACK = 150 * 10**6
"""Buffers, tables of the statistics, what the allocator keeps."""


@dataclass(frozen=True)
class Need:
    """Bytes."""

    process: int
    """Of the program itself."""
    weights: int
    working: int
    """What the method needs beside them, however long the text is."""
    passing: int
    """Temporary values of one batch."""
    activations: int
    spilled: int
    """Of the activations, those that stay in memory when they wait on disk."""
    alignment: int
    spill: bool = False

    @property
    def total(self) -> int:
        kept = self.spilled if self.spill else self.activations
        return self.process + self.weights + self.working + self.passing + kept + self.alignment + SLACK


def need(recipe: Recipe, layers: list[MoELayer], weights: PagedWeights, batches: list[CalibrationBatch] | None) -> Need:
    wide = calibration_dtype(recipe, weights.device) if batches is not None else None
    shapes = [LayerShape.of(layer) for layer in layers]
    experts, width = max(s.experts for s in shapes), max(s.width for s in shapes)
    units = max(s.hidden_units for s in shapes)
    refit, router = recipe.component("refit.method"), recipe.component("refit.router")
    visits = recipe.sequential or refit.visits or router.visits or bool(tokens_wanted(recipe))
    stored = max(weights.bytes_of(weights.targets(layer.name), None) for layer in layers)
    widened = max(weights.bytes_of(weights.targets(layer.name), wide) for layer in layers)
    kept = share_kept(recipe, experts)
    drops, aligned = recipe.component("plan.grouping").drops, recipe.component("align.method").name != "none"
    # The layer, what becomes of it, and, before they are averaged, the members of a group in a common order.
    made = kept + (0 if drops or not aligned else 1)
    held = max((1 + made) * (widened if visits else stored), widened if batches else 0)
    sizes = [tokens_of(batch) for batch in batches or []]
    vectors = FOLLOWED if refit.reference else FITTED if refit.visits else WAITING
    token = 4 * (vectors * width + (experts if refit.visits or router.visits else 0))
    passing = max((passing_bytes(batch, weights, experts, width, units) for batch in batches or []), default=0)
    alignment = max(parse_size(recipe.align.memory), 4 * units**2) if not drops and aligned else 0
    return Need(
        resident_memory(),
        round(held) + weights.around(layers, wide),
        working_bytes(recipe, refit, shapes, kept, sum(sizes), chosen_of(weights)),
        passing,
        sum(sizes) * token,
        (min(sum(sizes), 3 * max(sizes, default=0)) if weights.device.type == "cpu" else sum(sizes)) * token,
        min(alignment, 4 * units**2 * experts),
    )


def share_kept(recipe: Recipe, experts: int) -> float:
    """Of a layer's experts, at the most."""
    if recipe.keep is None or not recipe.component("plan.budget").one_count:
        return 1.0
    return min(1.0, recipe.keep if isinstance(recipe.keep, float) else recipe.keep / experts)


def tokens_of(batch: CalibrationBatch) -> int:
    return sum(keep.numel() for keep in batch.keep.values())


def chosen_of(weights: PagedWeights) -> int:
    """Experts of one token."""
    return getattr(weights.model.config.get_text_config(), "num_experts_per_tok", None) or 1


def passing_bytes(batch: CalibrationBatch, weights: PagedWeights, experts: int, width: int, units: int) -> int:
    config = weights.model.config.get_text_config()
    inner = max(units, getattr(config, "intermediate_size", None) or getattr(config, "d_ff", None) or 0)
    rows, length = max((tuple(keep.shape) for keep in batch.keep.values()), key=math.prod)
    heads = 0 if config._attn_implementation == "sdpa" else getattr(config, "num_attention_heads", None) or 1
    scores = rows * heads * length**2
    return (
        tokens_of(batch) * (4 * (PASSING * width + 3 * inner) + 2 * 8 * chosen_of(weights) * experts) + 3 * 4 * scores
    )


def working_bytes(recipe: Recipe, refit: Refit, shapes: list[LayerShape], kept: float, tokens: int, chosen: int) -> int:
    planner = planner_of(recipe)
    sums = sum(
        8 * math.prod(size)
        for shape in shapes
        for name in planner.needs
        for size in STATISTICS.get(name).sizes(shape).values()
    )
    return sums + max(working_of(recipe, refit, shape, kept, tokens, chosen) for shape in shapes)


def working_of(recipe: Recipe, refit: Refit, shape: LayerShape, share: float, tokens: int, chosen: int) -> int:
    """One layer's."""
    kept, choices = math.ceil(share * shape.experts), tokens * chosen
    sampled = 4 * tokens_wanted(recipe) * kept * shape.width
    tried = [s for s in planner_of(recipe).saliencies if isinstance(s, Elimination)]
    tries = max((4 * shape.experts * min(s.tokens, tokens) * (min(s.width, shape.width) + 1) for s in tried), default=0)
    solved = 0
    if isinstance(refit, LeastSquares):
        together = kept * shape.hidden_units
        if together <= refit.joint_units:
            solved = 8 * together**2 + 4 * 8 * together * shape.width + 3 * 4 * min(2**25, choices * shape.hidden_units)
        else:
            one = 3 * 8 * shape.hidden_units**2 + 4 * 8 * shape.hidden_units * shape.width
            solved = 4 * kept * shape.hidden_units * shape.width + one + 2 * 4 * min(HELD, choices * shape.hidden_units)
    return max(sampled, tries, solved)


def within(budget: int, recipe: Recipe, found: Need, layers: list[MoELayer]) -> tuple[Recipe, bool]:
    """The recipe that keeps the budget, and whether activations must wait on disk for it: first of all alignments are
    solved fewer at a time, which changes nothing else."""
    one = 4 * max(layer.adapter.widths(layer.block)[0] for layer in layers) ** 2 if found.alignment else 0
    smallest = replace(found, alignment=one)
    spill = smallest.total > budget
    least = replace(smallest, spill=True).total
    if least > budget:
        raise MoepressError(
            f"this needs about {human_size(math.ceil(least * 1.01))} of memory and may use {human_size(budget)}: "
            f"{human_size(found.weights)} for weights, {human_size(found.working)} for the method, "
            f"{human_size(found.spilled + found.passing)} for batches of text, {human_size(found.process)} for the "
            "program; give more (--memory), or smaller batches (--batch-size)"
        )
    found = replace(found, spill=spill)
    if found.total <= budget:
        return recipe, spill
    less = str(budget - found.total + found.alignment)
    return recipe.model_copy(update={"align": recipe.align.model_copy(update={"memory": less})}), spill


def resident_memory() -> int:
    """Of this process, now."""
    status = Path("/proc/self/statm")
    if not status.exists():
        return 10**9
    import resource

    return int(status.read_text().split()[1]) * resource.getpagesize()
