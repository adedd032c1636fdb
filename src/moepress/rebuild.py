"""Carry out one layer's plan on the model: align, merge, give the block its new shape."""

from __future__ import annotations

from dataclasses import replace

import torch

from moepress.align import ALIGNMENTS, Alignment, Solution, align_bank, kinds
from moepress.errors import MoepressError
from moepress.fit import parse_size
from moepress.journal import Finished
from moepress.merge import Evidence, install, merge_layer
from moepress.models.inputs import sample_inputs
from moepress.models.layer import ExpertBank, MoELayer
from moepress.models.visit import CalibrationBatch, LayerVisit
from moepress.observe import Fisher, gather_gradients
from moepress.plan import LayerPlan
from moepress.recipe import Recipe


def align_to_first(layer: MoELayer, recipe: Recipe, visit: LayerVisit | None = None) -> list[Solution]:
    """Every expert in the unit order of the layer's first; what the layer computes does not change."""
    method, solver, memory = recipe.component("align.method"), recipe.component("align.solver"), recipe.align.memory
    inputs = None
    if method.needs_visit and visit is not None:
        (inputs,) = sample_inputs(visit, [range(layer.num_experts)], method.tokens, recipe.seed)
    bank, solutions = align_bank(method, solver, layer.bank, memory=parse_size(memory), inputs=inputs)
    layer.adapter.write_bank(layer.block, bank)
    if visit is not None:
        visit.changed()
    return solutions


def group_alignment(recipe: Recipe) -> Alignment:
    """The one that is made inside of groups: none, if all experts have been aligned before."""
    return recipe.component("align.method") if recipe.align.reference != "first" else ALIGNMENTS.create("none")


def tokens_wanted(recipe: Recipe) -> int:
    """How many calibration tokens of each group the alignment and the merge look at."""
    parts = (recipe.component("align.method"), recipe.component("merge.operator"))
    return max(part.tokens if part.needs_visit else 0 for part in parts)


def evidence_of(visit: LayerVisit, plan: LayerPlan, recipe: Recipe, fisher: ExpertBank | None) -> Evidence:
    return replace(Evidence.of(visit, plan, tokens_wanted(recipe), recipe.seed), fisher=fisher)


def fisher_of(model: torch.nn.Module, layers: list[MoELayer], batches: list[CalibrationBatch]) -> dict[str, ExpertBank]:
    """By layer, in one pass: as much memory as their experts take in float32, until each is merged."""
    sums = {layer.name: Fisher() for layer in layers}
    gather_gradients(model, layers, batches, {name: [total] for name, total in sums.items()})
    return {name: total.bank for name, total in sums.items() if total.bank is not None}


@torch.no_grad()
def rebuild(
    layer: MoELayer,
    plan: LayerPlan,
    recipe: Recipe,
    aligned: list[Solution] | None = None,
    evidence: Evidence | None = None,
) -> Finished:
    """Carry out one layer's plan on the model. `aligned` are the alignments that were made before."""
    check_plan(layer, plan)
    if plan.untouched:
        return Finished(plan)
    operator, solver = recipe.component("merge.operator"), recipe.component("align.solver")
    memory = parse_size(recipe.align.memory)
    merged = merge_layer(layer.bank, plan, operator, group_alignment(recipe), solver, memory, evidence)
    spec = install(layer, plan, merged.experts, recipe.capacity)
    solutions = [*(aligned or []), *merged.solutions]
    gap = max((solution.gap for solution in solutions), default=0.0)
    return Finished(plan, spec, gap=gap, solved=kinds(solutions))


def check_plan(layer: MoELayer, plan: LayerPlan) -> None:
    if plan.experts != layer.num_experts:
        raise MoepressError(f"the plan has {plan.experts} experts for {layer.name!r}, the model {layer.num_experts}")
