"""Does a recipe fit a model? Everything that can be refused is refused here, before any calibration."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn

from moepress.checkpoint.sizes import expert_bytes, factored_bytes, human_size, sizes_of
from moepress.decompose.options import Decomposition
from moepress.decompose.stage import check_weights
from moepress.errors import MoepressError
from moepress.models.layer import CompactSpec, MoELayer
from moepress.models.weights import Weights
from moepress.observe import check_differentiable, from_gradients
from moepress.recipe import Recipe
from moepress.registry import did_you_mean
from moepress.team import Team

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def check_fit(recipe: Recipe, layers: list[MoELayer]) -> None:
    parse_size(recipe.align.memory)
    if not recipe.keeps_all and (recipe.keep is None) == (recipe.target_size is None):
        raise MoepressError("say how small: either keep (8 experts, or 0.5 of them) or target_size (12GB)")
    if type(recipe.keep) is int and (rest := recipe.keep % recipe.multiple_of):
        less = recipe.keep - rest
        near = f"{less} or {less + recipe.multiple_of}" if less else str(recipe.multiple_of)
        raise MoepressError(f"keep={recipe.keep} is not a multiple of {recipe.multiple_of} (multiple_of): keep {near}")
    if recipe.decomposition() is not None:
        check_weights(layers)
        if recipe.format == "vanilla":
            raise MoepressError(
                "a vanilla checkpoint has whole matrices: write a compact one, which export multiplies out"
            )
    if recipe.component("plan.grouping").drops and recipe.router != "keep":
        raise MoepressError("pruned experts take their router rows along: use router=keep")
    if recipe.component("refit.router").rows and recipe.component("plan.grouping").drops:
        raise MoepressError("where nothing is merged there are no rows to fit: leave refit.router out")
    if recipe.component("refit.router").trains and type(layers[0].weights) is not Weights:
        raise MoepressError(
            "refit.router=distil needs the whole model in memory: compress a loaded model, or leave it out and train "
            "the output with `moepress recover --train router`"
        )
    if recipe.component("refit.router").rows and recipe.router == "redirect":
        raise MoepressError("a redirect keeps all router rows: there is nothing to fit; use router=keep or mean")
    if (storage := layers[0].weights.quantised) and recipe.format != "vanilla":
        raise MoepressError(
            f"the model is quantised ({storage}), which a compact checkpoint cannot be: use format=vanilla "
            "(--format vanilla), quantised as the original is, and a method that keeps one router row an expert"
        )
    if recipe.format == "vanilla":
        if recipe.router == "redirect":
            raise MoepressError("a vanilla checkpoint has one router row per expert: use router=keep or router=mean")
        if not recipe.component("plan.budget").one_count:
            raise MoepressError("a vanilla checkpoint has one expert count for all layers: use plan.budget=uniform")
        if recipe.plan.skip not in ("none", []):
            raise MoepressError("a vanilla checkpoint cannot leave single layers whole: use plan.skip=none")
        for layer in layers:
            if not layer.adapter.vanilla:
                raise MoepressError(f"{layer.name!r}: this family has no vanilla form with fewer experts; use compact")
    if recipe.router != "redirect":
        for layer in layers:
            if reason := layer.adapter.rows_refusal(layer.block):
                way = "a method that merges (m-smoe)" if recipe.component("plan.grouping").drops else "router=redirect"
                raise MoepressError(f"layer {layer.name!r} cannot have fewer router rows, use {way}: {reason}")
    form = "redirect" if recipe.router == "redirect" else "rows"
    for layer in layers:
        layer.adapter.check(layer.block, CompactSpec(layer.num_experts, layer.num_experts, form, recipe.capacity))
        for name, tensor in layer.bank.tensors().items():
            # Weights that wait in files are looked at when they are read.
            if not tensor.is_meta and not bool(torch.isfinite(tensor).all()):
                raise MoepressError(f"layer {layer.name!r}: {name} holds weights that are not finite")


def needs_text(recipe: Recipe) -> bool:
    """Whether text is needed even where the plan is given."""
    operator, alignment = recipe.component("merge.operator"), recipe.component("align.method")
    looks = operator.needs_visit or operator.needs_fisher or alignment.needs_visit
    fits = recipe.component("refit.method").visits or recipe.component("refit.router").visits
    decomposition = recipe.decomposition()
    return looks or fits or recipe.sequential or (decomposition is not None and decomposition.needs_text)


def needs_gradients(recipe: Recipe, statistics: Iterable[str]) -> bool:
    return bool(from_gradients(statistics)) or recipe.component("merge.operator").needs_fisher


def needs_whole(recipe: Recipe, statistics: Iterable[str]) -> bool:
    """Whether all layers must be in memory together."""
    return needs_gradients(recipe, statistics) or recipe.decomposition() is not None


def check_whole(loaded: bool, budget: bool, resume: bool) -> None:
    """What cannot be asked for where the whole model is in memory: `loaded`, or because of gradients."""
    if budget:
        raise MoepressError(
            "a model in memory takes what it takes: give the folder that it comes from"
            if loaded
            else "gradients need the whole model in memory: leave memory out"
        )
    if resume:
        raise MoepressError(
            "a model in memory cannot be resumed: give the folder that it comes from"
            if loaded
            else "gradients need the whole model in memory, and such a run cannot be resumed: leave resume out"
        )


def check_shared(recipe: Recipe, in_memory: bool, team: Team) -> None:
    """Can several processes do it together, with the same result as one?"""
    if team.size == 1:
        return
    if in_memory:
        raise MoepressError(
            f"{team.size} processes share the work only where a folder or Hub model goes to a folder, layer by layer; "
            "what needs the whole model in memory (gradients, decomposition) is done by one: start it without torchrun"
        )
    refit, router = recipe.component("refit.method"), recipe.component("refit.router")
    tried = [s for s in (recipe.component("plan.saliency"), *recipe.rivals()) if s.needs_visit]
    fitted = [r for r in (refit, router) if r.visits]
    if alone := [part.name for part in (*tried, *fitted) if not part.shared]:
        raise MoepressError(f"{alone[0]!r} does not know how to share its work among {team.size} processes: use one")


def check_gradients(recipe: Recipe, statistics: Iterable[str], model: nn.Module, layers: list[MoELayer]) -> None:
    """Where something needs a pass with gradients: can there be one?"""
    if not needs_gradients(recipe, statistics):
        return
    if recipe.sequential:
        raise MoepressError(
            "gradients need the whole model, which sequential compression changes layer by layer: use sequential=false"
        )
    if recipe.align.reference == "first" and recipe.component("align.method").needs_visit:
        raise MoepressError(
            "gradients are taken after the alignment to the first expert and activations are seen later: "
            "use align.method=weight-matching, or align.reference=dominant"
        )
    check_differentiable(model, layers)


def skipped_layers(recipe: Recipe, model: nn.Module, layers: list[MoELayer]) -> set[str]:
    """Names of the MoE layers that stay whole."""
    if recipe.plan.skip == "none":
        return set()
    if recipe.plan.skip == "auto":
        # The paper leaves the first MoE layer of Switch's encoder as it is.
        if getattr(getattr(model, "config", None), "model_type", "") == "switch_transformers":
            return {next(layer.name for layer in layers if layer.stack == "encoder")}
        return set()
    names = [layer.name for layer in layers]
    for name in recipe.plan.skip:
        if name not in names:
            raise MoepressError(f"plan.skip: there is no MoE layer {name!r}: {did_you_mean(name, names)}")
    return set(recipe.plan.skip)


def average_experts(recipe: Recipe, model: nn.Module, layers: list[MoELayer], skipped: set[str]) -> float:
    """Experts to keep per layer, averaged over the layers that are not skipped."""
    chosen = [layer for layer in layers if layer.name not in skipped]
    if not chosen:
        raise MoepressError("every MoE layer is skipped: there is nothing to merge")
    if (decomposition := recipe.decomposition()) is not None:
        for layer in chosen:
            decomposition.check(layer)
    experts = min(layer.num_experts for layer in chosen)
    if recipe.keeps_all:
        return float(experts)
    if recipe.keep is not None:
        average = recipe.keep * experts if isinstance(recipe.keep, float) else float(recipe.keep)
        if average > experts:
            raise MoepressError(f"keep={recipe.keep} is more than the {experts} experts that a layer has")
        if round(average * len(chosen)) < len(chosen):
            raise MoepressError(f"keep={recipe.keep} leaves less than one of {experts} experts a layer")
        return average
    target = parse_size(str(recipe.target_size))
    one_of_each = sum(_kept_bytes(layer, decomposition) for layer in chosen)
    other = sizes_of(model).bytes - sum(expert_bytes(layer) * layer.num_experts for layer in chosen)
    average = (target - other) / one_of_each
    if average < 1:
        least = other + one_of_each
        raise MoepressError(
            f"target_size {recipe.target_size}: with one expert a layer it would be {human_size(least)}"
        )
    return min(average, float(experts))


def check_smaller(recipe: Recipe, model: nn.Module, layers: list[MoELayer]) -> None:
    """Before something is written: would anything become smaller?"""
    if recipe.decomposition() is not None or (recipe.keep is None) == (recipe.target_size is None):
        return  # experts become smaller, or `check_fit` says what is wrong
    skipped = skipped_layers(recipe, model, layers)
    average = average_experts(recipe, model, layers, skipped)
    if average >= max(layer.num_experts for layer in layers if layer.name not in skipped):
        given = f"keep={recipe.keep}" if recipe.keep is not None else f"target_size {recipe.target_size}"
        raise MoepressError(f"{given} keeps all {average:g} experts a layer: nothing would be smaller; ask for less")


def _kept_bytes(layer: MoELayer, decomposition: Decomposition | None) -> int:
    """What one kept expert will take, on average over the layers where they are decomposed."""
    if decomposition is None:
        return expert_bytes(layer)
    bank = layer.bank
    return factored_bytes(bank, decomposition.expected(bank, bank.num_experts)) // bank.num_experts


def parse_size(text: str) -> int:
    """Bytes of "12GB", "700 MiB", "1.5g"."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match.group(2) not in UNITS or match.group(1).count(".") > 1 or match.group(1) == ".":
        raise MoepressError(f"{text!r} is not a size: write 12GB or 700MiB")
    return int(float(match.group(1)) * UNITS[match.group(2)])


def bytes_from(size: int | str | None) -> int | None:
    return parse_size(size) if isinstance(size, str) else size


def shard_bytes(size: int | str) -> int:
    found = size if isinstance(size, int) else parse_size(size)
    if found < 1:
        raise MoepressError(f"max_shard_size must be positive, not {size}")
    return found
