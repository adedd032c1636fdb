"""The order of the stages, as in Algorithm 1 of MC-SMoE: observe, plan, align, merge, write."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from transformers import PreTrainedModel

from moepress.align import ALIGNMENTS, align_bank, kinds
from moepress.errors import MoepressError
from moepress.evaluation.precision import in_dtype
from moepress.fit import average_experts, check_fit, parse_size, skipped_layers
from moepress.merge import merge_layer, router_rows
from moepress.models.find import find_layers
from moepress.models.layer import CompactSpec, MoELayer
from moepress.models.probe import probe
from moepress.models.visit import CalibrationBatch, LayerVisit
from moepress.models.walk import walk
from moepress.observe import Statistics
from moepress.plan import LayerFacts, LayerPlan, Plan, Planner
from moepress.progress import track
from moepress.recipe import Recipe
from moepress.refit import Refit
from moepress.trial import attempt, split


@dataclass
class Outcome:
    """What a compression did; saved beside the output (without the model)."""

    model: PreTrainedModel
    recipe: Recipe
    plan: Plan
    statistics: Statistics
    specs: dict[str, CompactSpec]
    seconds: dict[str, float] = field(default_factory=dict)
    gaps: dict[str, float] = field(default_factory=dict)
    """Worst certified alignment gap by layer."""
    picked: dict[str, str] = field(default_factory=dict)
    """The saliency whose plan won, by layer, where several compete."""
    notes: list[str] = field(default_factory=list)
    """What was done otherwise than was meant, and why."""
    solved: Counter[str] = field(default_factory=Counter)
    """How many alignments were solved in which way."""

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def press(
    model: PreTrainedModel,
    recipe: Recipe,
    batches: Callable[[], list[CalibrationBatch]],
    *,
    statistics: Statistics | None = None,
    plan: Plan | None = None,
) -> Outcome:
    """Compress a model in memory, in place. Saved statistics or an edited plan replace the stage that makes them.

    `batches` is called once everything that can be refused without text has been checked.
    """
    layers = find_layers(model)
    check_fit(recipe, layers)
    skipped = skipped_layers(recipe, model, layers)
    average = average_experts(recipe, model, layers, skipped)
    planner, refit = planner_of(recipe), recipe.component("refit.method")
    planner.check(facts_of(layers, Statistics(), recipe), skipped, average)
    if statistics is not None:
        check_statistics(statistics, layers, planner, recipe)
    outcome = Outcome(model, recipe, Plan(layers=()), statistics or Statistics(), {})
    scores: dict[str, torch.Tensor] = {}

    if plan is None and statistics is None and not (recipe.sequential and planner.budget.one_count):
        with outcome.timed("observe"), in_dtype(model, calibration_dtype(recipe, model)):
            for visit in track(walk(model, batches(), layers=layers), "observe", len(layers)):
                outcome.statistics.gather(visit, planner.needs)
                if planner.saliency.needs_visit and visit.layer.name not in skipped:
                    scores[visit.layer.name] = planner.score(facts_of(visit, outcome.statistics, recipe)[0])

    if recipe.align.reference == "first":
        with outcome.timed("align"):
            for layer in track(layers, "align"):
                align_to_first(layer, recipe, outcome)

    if recipe.sequential or refit.visits:
        counts = {} if plan else planner.counts(facts_of(layers, outcome.statistics, recipe), skipped, average, scores)
        with outcome.timed("merge"), stored_dtypes(layers), in_dtype(model, calibration_dtype(recipe, model)):
            text = batches()
            if refit.visits:
                refit, note = refit.suited(probe(model, text, layers))
                outcome.notes += [note] if note else []
            outcome.plan = rebuild_visited(layers, text, planner, counts, plan, refit, outcome)
        return outcome

    with outcome.timed("plan"):
        outcome.plan = plan or planner.make(facts_of(layers, outcome.statistics, recipe), skipped, average)
    with outcome.timed("merge"):
        for layer in track(layers, "merge"):
            rebuild(layer, outcome.plan.of(layer.name), recipe, outcome)
    return outcome


def rebuild_visited(
    layers: list[MoELayer],
    batches: list[CalibrationBatch],
    planner: Planner,
    counts: dict[str, int],
    plan: Plan | None,
    refit: Refit,
    outcome: Outcome,
) -> Plan:
    """Plan, rebuild and refit one layer after the other, each with the inputs that it has by then."""
    recipe = outcome.recipe
    made: dict[str, LayerPlan] = {}
    walked = walk(outcome.model, batches, layers=layers, sequential=recipe.sequential, reference=refit.reference)
    for visit in track(walked, "compress", len(layers)):
        layer = visit.layer
        if plan is None and recipe.sequential:
            outcome.statistics.gather(visit, planner.needs)
        if plan is not None:
            chosen, refitted = plan.of(layer.name), True
        else:
            facts = facts_of(visit, outcome.statistics, recipe)[0]
            chosen, refitted = pick(visit, planner.candidates(facts, counts[layer.name]), refit, outcome)
        made[layer.name] = chosen
        if not chosen.untouched:
            whole = refit.remember(visit) if refitted else {}
            rebuild(layer, chosen, recipe, outcome)
            visit.changed()
            if refitted:
                refit.fit(visit, whole)
    return Plan(layers=tuple(made[layer.name] for layer in layers))


def pick(visit: LayerVisit, plans: dict[str, LayerPlan], refit: Refit, outcome: Outcome) -> tuple[LayerPlan, bool]:
    """Of several plans the one that leaves the smallest error on held-out batches, and whether its refit helps there.
    One plan alone is not tried."""
    name, plan = next(iter(plans.items()))
    refitted = True
    if len(plans) > 1:
        scratch = Outcome(outcome.model, outcome.recipe, outcome.plan, outcome.statistics, {})
        fit, held = split(visit)
        tried = {
            name: attempt(visit, partial(rebuild, plan=plan, recipe=outcome.recipe, outcome=scratch), refit, fit, held)
            for name, plan in plans.items()
        }
        name = min(tried, key=lambda name: tried[name].best)
        plan, refitted = plans[name], tried[name].refitted <= tried[name].plain
        outcome.picked[visit.layer.name] = name
    return plan, refitted


def check_statistics(statistics: Statistics, layers: list[MoELayer], planner: Planner, recipe: Recipe) -> None:
    """Saved statistics must be of this model and hold what the method needs."""
    if recipe.sequential:
        raise MoepressError("sequential compression gathers its statistics as it goes: it cannot use saved ones")
    for layer in layers:
        for name in planner.needs:
            sums = statistics.of(layer, name)
            if name == "usage" and len(sums["count"]) != layer.num_experts:
                raise MoepressError(
                    f"the statistics of {layer.name!r} are of a model with {len(sums['count'])} experts"
                )


def calibration_dtype(recipe: Recipe, model: PreTrainedModel) -> torch.dtype | None:
    """What 16-bit weights are widened to while text runs through the model; None leaves them."""
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return torch.float32 if recipe.precision == "float32" or (recipe.precision == "auto" and on_cpu) else None


@contextmanager
def stored_dtypes(layers: list[MoELayer]) -> Iterator[None]:
    """Layers that are rebuilt inside are new tensors: they go back to the precision that the old ones had."""
    before = {layer.name: {name: t.dtype for name, t in layer.block.state_dict().items()} for layer in layers}
    yield
    for layer in layers:
        for name, tensor in [*layer.block.named_parameters(), *layer.block.named_buffers()]:
            dtype = before[layer.name].get(name, tensor.dtype)
            if tensor.dtype != dtype:
                tensor.data = tensor.data.to(dtype)


def align_to_first(layer: MoELayer, recipe: Recipe, outcome: Outcome) -> None:
    """Every expert in the unit order of the layer's first; what the layer computes does not change."""
    method, solver, memory = recipe.component("align.method"), recipe.component("align.solver"), recipe.align.memory
    bank, solutions = align_bank(method, solver, layer.bank, memory=parse_size(memory))
    layer.adapter.write_bank(layer.block, bank)
    outcome.gaps[layer.name] = max((solution.gap for solution in solutions), default=0.0)
    outcome.solved += kinds(solutions)


@torch.no_grad()
def rebuild(layer: MoELayer, plan: LayerPlan, recipe: Recipe, outcome: Outcome) -> None:
    """Carry out one layer's plan on the model."""
    check_plan(layer, plan)
    if plan.untouched:
        return
    alignment = recipe.component("align.method") if recipe.align.reference != "first" else ALIGNMENTS.create("none")
    operator, solver = recipe.component("merge.operator"), recipe.component("align.solver")
    merged = merge_layer(layer.bank, plan, operator, alignment, solver, parse_size(recipe.align.memory))
    rows = router_rows(layer.router, plan) if plan.router != "redirect" else {}
    spec = CompactSpec(
        plan.experts, plan.physical, "redirect" if plan.router == "redirect" else "rows", recipe.capacity
    )
    layer.adapter.reshape(layer.block, spec)
    layer.adapter.write_bank(layer.block, merged.bank)
    if plan.router == "redirect":
        expert_map = layer.adapter.expert_map(layer.block)
        assert expert_map is not None
        expert_map.copy_(torch.tensor(plan.expert_map()))
    else:
        layer.adapter.write_router(layer.block, rows)
    outcome.gaps[layer.name] = max(outcome.gaps.get(layer.name, 0.0), merged.gap)
    outcome.solved += merged.solved
    outcome.specs[layer.name] = spec


def check_plan(layer: MoELayer, plan: LayerPlan) -> None:
    if plan.experts != layer.num_experts:
        raise MoepressError(f"the plan has {plan.experts} experts for {layer.name!r}, the model {layer.num_experts}")


def planner_of(recipe: Recipe) -> Planner:
    return Planner(
        saliency=recipe.component("plan.saliency"),
        similarity=recipe.component("plan.similarity"),
        budget=recipe.component("plan.budget"),
        grouping=recipe.component("plan.grouping"),
        router=recipe.router,
        member_weights=recipe.component("merge.operator").weights,
        multiple_of=recipe.multiple_of,
        rivals=recipe.rivals(),
    )


def facts_of(layers: list[MoELayer] | LayerVisit, statistics: Statistics, recipe: Recipe) -> list[LayerFacts]:
    """Of layers, or of the one that is being visited."""
    visit, given = (layers, [layers.layer]) if isinstance(layers, LayerVisit) else (None, layers)
    return [
        LayerFacts(
            name=layer.name,
            index=layer.index,
            read_bank=lambda layer=layer: layer.bank,  # type: ignore[misc]
            router=layer.router,
            statistics={name: s.sums for name, s in statistics.layers.get(layer.name, {}).items()},
            seed=recipe.seed,
            visit=visit,
        )
        for layer in given
    ]
