"""The order of the stages, as in Algorithm 1 of MC-SMoE: observe, plan, align, merge, write."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from transformers import PreTrainedModel

from moepress.align import Solution
from moepress.decompose.options import remaining_shares, shape_so_far
from moepress.decompose.stable_rank import stable_ranks
from moepress.decompose.stage import decompose
from moepress.errors import MoepressError
from moepress.fit import average_experts, check_fit, check_gradients, needs_gradients, skipped_layers
from moepress.journal import Finished, Journal, Observed
from moepress.memory import high_water_mark
from moepress.merge import Evidence
from moepress.models.find import find_layers
from moepress.models.layer import CompactSpec, ExpertBank, MoELayer
from moepress.models.probe import probe
from moepress.models.visit import CalibrationBatch, LayerVisit
from moepress.models.walk import walk
from moepress.observe import Statistics, from_gradients
from moepress.plan import LayerPlan, Plan, Planner
from moepress.planning import check_statistics, facts_of, planner_of, rounding_note
from moepress.progress import track
from moepress.rebuild import align_to_first, evidence_of, fisher_of, rebuild, tokens_wanted
from moepress.recipe import Recipe
from moepress.refit import Refit
from moepress.team import ALONE, Team
from moepress.trial import Damage, Trial, attempt, split


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
    stable_ranks: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    """Where matrices are decomposed: by layer, `before` and `after` merging, by matrix, one number an expert."""
    remaining: dict[str, list[float]] = field(default_factory=dict)
    """The share of its parameters that each decomposed expert still has, by layer."""
    solved: Counter[str] = field(default_factory=Counter)
    """How many alignments were solved in which way."""
    similarity: dict[str, torch.Tensor] = field(default_factory=dict)
    """By layer, how alike its experts were found (E, E), where that decided which are merged."""
    output_error: dict[str, float] = field(default_factory=dict)
    """By layer, the relative squared error of its output on its inputs, where those were at hand."""
    memory: dict[str, int] = field(default_factory=dict)
    """The most memory in bytes since the start, as it stood at the end of each stage."""
    aligned: dict[str, list[Solution]] = field(default_factory=dict)
    """Alignments to the first expert that were made before gradients were taken, by layer."""
    fisher: dict[str, ExpertBank] = field(default_factory=dict)
    """Diagonal Fisher information of the layers that wait to be merged, where the operator wants it."""

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
        if (peak := high_water_mark(next(self.model.parameters()).device)) is not None:
            self.memory[stage] = peak

    def add(self, layer: MoELayer, done: Finished) -> LayerPlan:
        """Take note of a finished layer."""
        if done.statistics:
            self.statistics.layers[layer.name] = done.statistics
        if done.spec is not None:
            self.specs[layer.name] = done.spec
        if done.gap is not None:
            self.gaps[layer.name] = done.gap
        if done.picked is not None:
            self.picked[layer.name] = done.picked
        if done.similarity_EE is not None:
            self.similarity[layer.name] = done.similarity_EE
        if done.output_error is not None:
            self.output_error[layer.name] = done.output_error
        self.solved += done.solved
        return done.plan


def press(
    model: PreTrainedModel,
    recipe: Recipe,
    batches: Callable[[], list[CalibrationBatch]],
    *,
    statistics: Statistics | None = None,
    plan: Plan | None = None,
    journal: Journal | None = None,
    team: Team = ALONE,
) -> Outcome:
    """Compress a model in place. Saved statistics or an edited plan replace the stage that makes them.

    `batches` is called once everything that can be refused without text has been checked. `journal` is told of every
    layer that is done, and knows those that an interrupted run has done. `team`: the processes that work together.
    """
    journal = journal or Journal()
    layers = find_layers(model)
    check_fit(recipe, layers)
    skipped = skipped_layers(recipe, model, layers)
    average = average_experts(recipe, model, layers, skipped)
    planner, refit = planner_of(recipe), recipe.component("refit.method")
    router = recipe.component("refit.router")
    expected = planner.check(facts_of(layers, Statistics(), recipe), skipped, average)
    check_gradients(recipe, planner.needs, model, layers)
    if statistics is not None:
        check_statistics(statistics, layers, planner, recipe)
    if recipe.keeps_all:
        if plan is not None:
            raise MoepressError(f"method {recipe.method!r} keeps all experts: it has no use for a plan")
        plan = Plan(layers=tuple(LayerPlan.keep_all(layer.name, layer.num_experts) for layer in layers))
    weights = layers[0].weights
    original = copy.deepcopy(model) if router.trains else None
    outcome = Outcome(model, recipe, Plan(layers=()), statistics or Statistics(), {})
    if plan is None:
        outcome.notes += rounding_note(planner, expected, skipped, average)
    scores: dict[str, torch.Tensor] = {}

    if needs_gradients(recipe, planner.needs) and recipe.align.reference == "first":
        with outcome.timed("align"):  # gradients are in the unit order that the experts have when they are taken
            outcome.aligned = {layer.name: align_to_first(layer, recipe) for layer in track(layers, "align")}

    decomposition = recipe.decomposition()
    decomposed = [layer for layer in layers if layer.name not in skipped] if decomposition is not None else []
    note_ranks(decomposed, "before", outcome)
    if plan is None and statistics is None and not (recipe.sequential and planner.budget.one_count):
        with outcome.timed("observe"), weights.widened(calibration_dtype(recipe, weights.device)):
            scores = observe(layers, batches, planner, skipped, outcome, journal, team)

    with outcome.timed("plan"):
        counts = {} if plan else planner.counts(facts_of(layers, outcome.statistics, recipe), skipped, average, scores)
    if recipe.component("merge.operator").needs_fisher:
        with outcome.timed("gradients"), weights.widened(calibration_dtype(recipe, weights.device)):
            merged = [layer for layer in layers if not stays_whole(layer, counts, plan)]
            outcome.fisher = fisher_of(model, merged, batches())
    if recipe.sequential or refit.visits or router.visits or tokens_wanted(recipe):
        widened = weights.widened(calibration_dtype(recipe, weights.device))
        with outcome.timed("merge"), stored_dtypes(layers) as stored, widened:
            text = batches()
            if refit.visits or router.visits:
                found = probe(model, text, layers)
                router.check(found)
                refit, note = refit.suited(found)
                outcome.notes += [note] if note else []
            outcome.plan = rebuild_visited(layers, text, planner, counts, plan, refit, outcome, journal, team, stored)
    else:
        with outcome.timed("merge"):
            outcome.plan = rebuild_unseen(layers, planner, counts, plan, outcome, journal, team)
    note_ranks(decomposed, "after", outcome)
    if decomposition is not None:
        with outcome.timed("decompose"):
            specs = {layer.name: shape_so_far(layer, outcome.specs, recipe.capacity) for layer in decomposed}
            dtype = calibration_dtype(recipe, weights.device)
            outcome.specs |= decompose(model, decomposed, specs, batches, decomposition, dtype)
            outcome.remaining = {layer.name: remaining_shares(layer) for layer in decomposed}
    if original is not None:
        with outcome.timed("router"):
            outcome.notes.append(router.train(model, original, batches(), recipe.seed))
    return outcome


def note_ranks(layers: list[MoELayer], when: str, outcome: Outcome) -> None:
    with outcome.timed("stable ranks") if layers else nullcontext():
        for layer in layers:
            outcome.stable_ranks.setdefault(layer.name, {})[when] = stable_ranks(layer.bank)


def observe(
    layers: list[MoELayer],
    batches: Callable[[], list[CalibrationBatch]],
    planner: Planner,
    skipped: set[str],
    outcome: Outcome,
    journal: Journal,
    team: Team,
) -> dict[str, torch.Tensor]:
    """Gather the statistics of all layers; returns the scores that can only be made while a layer is visited."""
    known = {layer.name: found for layer in layers if (found := journal.observed(layer)) is not None}
    if len(known) < len(layers):
        if from_gradients(planner.needs):
            outcome.statistics.gather_gradients(outcome.model, layers, batches(), planner.needs)
        for visit in track(walk(outcome.model, batches(), layers=layers, team=team), "observe", len(layers)):
            layer = visit.layer
            if layer.name not in known:
                outcome.statistics.gather(visit, planner.needs)
                found = Observed(outcome.statistics.layers[layer.name])
                if planner.saliency.needs_visit and layer.name not in skipped:
                    found.score_E = planner.score(facts_of(visit, outcome.statistics, outcome.recipe)[0])
                journal.note(layer, found)
                known[layer.name] = found
    outcome.statistics.layers = {layer.name: known[layer.name].statistics for layer in layers}
    return {name: found.score_E for name, found in known.items() if found.score_E is not None}


def rebuild_unseen(
    layers: list[MoELayer],
    planner: Planner,
    counts: dict[str, int],
    plan: Plan | None,
    outcome: Outcome,
    journal: Journal,
    team: Team,
) -> Plan:
    """Plan and rebuild one layer after the other, without their inputs; each process has layers of its own."""
    known = {layer.name: done for layer in layers if (done := journal.finished(layer)) is not None}
    own: dict[str, Finished] = {}
    for layer in track(team.turns([layer for layer in layers if layer.name not in known]), "merge"):
        whole = counts.get(layer.name) == layer.num_experts
        with nullcontext() if whole else layer.weights.at_hand(layer):
            own[layer.name] = finish_unseen(layer, planner, counts, plan, outcome)
            journal.finish_alone(layer, own[layer.name])
    known |= journal.together(layers, own)
    for layer in layers:
        if layer.name not in own and (spec := known[layer.name].spec) is not None:
            layer.adapter.reshape(layer.block, spec)
    return Plan(layers=tuple(outcome.add(layer, known[layer.name]) for layer in layers))


def finish_unseen(
    layer: MoELayer, planner: Planner, counts: dict[str, int], plan: Plan | None, outcome: Outcome
) -> Finished:
    recipe = outcome.recipe
    aligned = align(layer, counts, plan, outcome)
    if plan is not None:
        chosen = plan.of(layer.name)
    else:
        chosen = planner.layer(facts_of([layer], outcome.statistics, recipe)[0], counts[layer.name])
    done = rebuild(layer, chosen, recipe, aligned, Evidence(fisher=outcome.fisher.pop(layer.name, None)))
    done.similarity_EE = planner.found.get(layer.name)
    return done


def align(
    layer: MoELayer, counts: dict[str, int], plan: Plan | None, outcome: Outcome, visit: LayerVisit | None = None
) -> list[Solution]:
    """To the first expert, if the recipe wants that and it has not been done."""
    if outcome.recipe.align.reference != "first" or stays_whole(layer, counts, plan):
        return []
    known = outcome.aligned.pop(layer.name, None)
    return align_to_first(layer, outcome.recipe, visit) if known is None else known


def stays_whole(layer: MoELayer, counts: dict[str, int], plan: Plan | None) -> bool:
    return counts.get(layer.name) == layer.num_experts or (plan is not None and plan.of(layer.name).untouched)


def rebuild_visited(
    layers: list[MoELayer],
    batches: list[CalibrationBatch],
    planner: Planner,
    counts: dict[str, int],
    plan: Plan | None,
    refit: Refit,
    outcome: Outcome,
    journal: Journal,
    team: Team,
    stored: dict[str, dict[str, torch.dtype]],
) -> Plan:
    """Plan, rebuild and refit one layer after the other, each with the inputs that it has by then.

    The batches go on through a layer as it is stored: what is written is what later layers were made for, and an
    interrupted run that reads its finished layers again goes on exactly as it would have.
    """
    recipe = outcome.recipe
    made: dict[str, LayerPlan] = {}
    walked = walk(
        outcome.model, batches, layers=layers, sequential=recipe.sequential, reference=refit.reference, team=team
    )
    for visit in track(walked, "compress", len(layers)):
        layer = visit.layer
        if not recipe.sequential:
            visit.complete()
        done = journal.finished(layer)
        if done is not None:
            if done.spec is not None:
                journal.restore(layer, done)
                visit.changed()
        else:
            done = finish_visited(visit, planner, counts, plan, refit, outcome)
            round_as_stored(layer, stored[layer.name])
            visit.changed()
            journal.finish(layer, done)
            visit.changed()  # what is stored in fewer bits has been read back
        made[layer.name] = outcome.add(layer, done)
    return Plan(layers=tuple(made[layer.name] for layer in layers))


def finish_visited(
    visit: LayerVisit,
    planner: Planner,
    counts: dict[str, int],
    plan: Plan | None,
    refit: Refit,
    outcome: Outcome,
) -> Finished:
    layer, recipe = visit.layer, outcome.recipe
    gathered = outcome.statistics.gather(visit, planner.needs) if plan is None and recipe.sequential else {}
    aligned = align(layer, counts, plan, outcome, visit)
    fisher = outcome.fisher.pop(layer.name, None)
    picked, refitted = None, True
    if plan is not None:
        chosen = plan.of(layer.name)
    else:
        facts = facts_of(visit, outcome.statistics, recipe)[0]
        chosen, refitted, picked = pick(visit, planner.candidates(facts, counts[layer.name]), refit, recipe, fisher)
    router = recipe.component("refit.router")
    damage = None if chosen.untouched else Damage(visit)
    outputs = refit.remember(visit) if refitted and not chosen.untouched else {}
    logits = router.remember(visit) if not chosen.untouched else {}
    done = rebuild(layer, chosen, recipe, aligned, evidence_of(visit, chosen, recipe, fisher))
    if damage is not None:
        visit.changed()
        if router.visits:
            router.fit(visit, chosen, logits)
            visit.changed()
        if refitted:
            refit.fit(visit, outputs)
        done.output_error = damage.measure()
    done.statistics, done.picked, done.similarity_EE = gathered, picked, planner.found.get(layer.name)
    return done


def pick(
    visit: LayerVisit, plans: dict[str, LayerPlan], refit: Refit, recipe: Recipe, fisher: ExpertBank | None
) -> tuple[LayerPlan, bool, str | None]:
    """Of several plans the one that leaves the smallest error on held-out batches, whether its refit helps there, and
    its name. One plan alone is not tried."""
    if len(plans) == 1:
        return next(iter(plans.values())), True, None
    fit, held = split(visit)
    tried: dict[str, Trial] = {}
    for name, plan in plans.items():
        carry_out = partial(rebuild, plan=plan, recipe=recipe, evidence=evidence_of(visit, plan, recipe, fisher))
        # A refit makes errors alike: it seldom lets a plan overtake one that is much better without it.
        hopeless = 1.2 * min((trial.plain for trial in tried.values()), default=math.inf)
        tried[name] = attempt(visit, carry_out, refit, fit, held, hopeless)
    name = min(tried, key=lambda name: tried[name].best)
    return plans[name], tried[name].refitted <= tried[name].plain, name


def calibration_dtype(recipe: Recipe, device: torch.device) -> torch.dtype | None:
    """What 16-bit weights are widened to while text runs through the model; None leaves them."""
    on_cpu = device.type == "cpu"
    return torch.float32 if recipe.precision == "float32" or (recipe.precision == "auto" and on_cpu) else None


@torch.no_grad()
def round_as_stored(layer: MoELayer, stored: dict[str, torch.dtype]) -> None:
    """Values that the stored type can hold, still in the type that is calculated with."""
    for name, tensor in [*layer.block.named_parameters(), *layer.block.named_buffers()]:
        dtype = stored.get(name, tensor.dtype)
        if tensor.dtype != dtype:
            for piece in tensor if tensor.dim() > 2 else (tensor,):
                piece.copy_(piece.to(dtype))


def dtypes_of(layer: MoELayer) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in layer.block.state_dict().items()}


@contextmanager
def stored_dtypes(layers: list[MoELayer]) -> Iterator[dict[str, dict[str, torch.dtype]]]:
    """Layers that are rebuilt inside are new tensors: they go back to the precision that the old ones had."""
    before = {layer.name: dtypes_of(layer) for layer in layers}
    yield before
    for layer in layers:
        for name, tensor in [*layer.block.named_parameters(), *layer.block.named_buffers()]:
            dtype = before[layer.name].get(name, tensor.dtype)
            if tensor.dtype != dtype:
                tensor.data = tensor.data.to(dtype)
