"""Vanilla export: a checkpoint of the original family without a trace of moepress, for any engine that knows it.

The family's own format has one number of experts for all layers and no expert_map. A model fits if every layer keeps
its own router rows and all keep equally many; any redirect fits once its experts are written out again, at the size
of the original.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moepress.checkpoint.compact import compact_specs
from moepress.checkpoint.companions import copy_companions
from moepress.checkpoint.counts import set_expert_count
from moepress.checkpoint.guard import NOTICE
from moepress.checkpoint.wording import keep_wording
from moepress.errors import MoepressError
from moepress.models.find import find_layers
from moepress.models.layer import CompactSpec, MoELayer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NO_LIMIT = 1 << 20
"""An expert capacity that no sequence reaches."""


def save_vanilla(
    model: PreTrainedModel,
    specs: Mapping[str, CompactSpec] | None,
    folder: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    max_shard_size: int | str = "5GB",
    multiple_of: int = 1,
    duplicate: bool = False,
) -> None:
    """Write a checkpoint that stock transformers, vLLM, SGLang and llama.cpp take for one of the original family.

    `multiple_of`: the number of experts must divide by it (expert or tensor parallelism). `duplicate`: write the
    experts of redirected layers out again: exact, and as large as the original. Decomposed matrices are multiplied
    out. `source`: the folder from which tokenizer and processor files are copied.
    """
    specs = dict(compact_specs(model) if specs is None else specs)
    plain = expand_to_vanilla(model, specs) if duplicate else shrink_to_vanilla(model, specs, multiple_of)
    plain.save_pretrained(os.fspath(folder), max_shard_size=max_shard_size)
    if source is not None:
        copy_companions(source, folder)
        keep_wording(source, folder, type(plain.config))


def shrink_to_vanilla(
    model: PreTrainedModel, specs: Mapping[str, CompactSpec], multiple_of: int = 1
) -> PreTrainedModel:
    """The same model in its native class with fewer experts. Shares the weights of `model`."""
    layers = find_layers(model)
    old, new = vanilla_counts(layers, specs, multiple_of)
    plain = plain_skeleton(model, specs, old, new)
    ours = ("expert_map", NOTICE)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(ours)}
    decomposed = [path for path, spec in specs.items() if spec.factors is not None]
    if not decomposed:
        _fill(plain, state)
        return plain
    inside = tuple(f"{path}." for path in decomposed)
    missing = {name: t for name, t in plain.state_dict().items() if name not in state and name.startswith(inside)}
    state = {name: tensor for name, tensor in state.items() if ".factors." not in name}
    _fill(plain, state | {name: torch.empty(t.shape, dtype=t.dtype) for name, t in missing.items()})
    banks = {layer.name: layer.bank for layer in layers}
    for target in find_layers(plain):
        if target.name in decomposed:
            target.adapter.write_bank(target.block, banks[target.name])
    return plain


def plain_skeleton(model: PreTrainedModel, specs: Mapping[str, CompactSpec], old: int, new: int) -> PreTrainedModel:
    """The native model with `new` instead of `old` experts, without weights."""
    config = _plain_config(model, specs)
    if new != old:
        set_expert_count(config, old, new)
    return _empty(model, config)


def expand_to_vanilla(model: PreTrainedModel, specs: Mapping[str, CompactSpec] | None = None) -> PreTrainedModel:
    """The same model with every expert of the original written out, duplicates included."""
    specs = compact_specs(model) if specs is None else specs
    for path, spec in specs.items():
        if spec.router == "rows" and spec.physical != spec.experts:
            raise MoepressError(
                f"layer {path!r} has only {spec.physical} router rows: without a redirect there is nothing to duplicate"
            )
    plain = _empty(model, _plain_config(model, specs))
    wanted = plain.state_dict()
    compact = tuple(f"{path}." for path in specs)
    own = model.state_dict()
    state = {name: own[name] for name, t in wanted.items() if name in own and own[name].shape == t.shape}
    for name in wanted.keys() - state.keys():
        if not name.startswith(compact):
            raise MoepressError(f"{type(model).__name__} lacks {name}, which the original had")
        state[name] = torch.empty(wanted[name].shape, dtype=wanted[name].dtype)
    # the experts are about to be written over, and must not be those of `model`
    inside = [name for name in state if name.startswith(compact)]
    _fill(plain, state | {name: state[name].clone() for name in inside})
    layers = {layer.name: layer for layer in find_layers(model)}
    for target in find_layers(plain):
        bank, expert_map = layers[target.name].bank, layers[target.name].adapter.expert_map(layers[target.name].block)
        target.adapter.write_bank(target.block, bank if expert_map is None else bank.select(expert_map))
    return plain


def vanilla_counts(layers: list[MoELayer], specs: Mapping[str, CompactSpec], multiple_of: int = 1) -> tuple[int, int]:
    """The number of experts of the original and of the export. Raises if the family's format cannot hold the model."""
    counts: dict[str, tuple[int, int]] = {}
    for layer in layers:
        spec = specs.get(layer.name) or CompactSpec(layer.num_experts, layer.num_experts, "rows")
        if not layer.adapter.vanilla:
            raise MoepressError(f"the {layer.adapter.name} family has no vanilla form with fewer experts")
        if spec.router != "rows" and not _is_identity(layer):
            raise MoepressError(
                f"layer {layer.name!r} redirects {spec.experts} router rows to {spec.physical} experts, which the "
                "original format cannot say: compress with a router action that keeps one row per expert, or export "
                "with duplicated experts"
            )
        counts[layer.name] = (spec.experts, spec.physical)
    _all_equal({name: physical for name, (_, physical) in counts.items()})
    (old, new), *_ = counts.values()
    for layer in layers:
        check_router(layer, new)
    if new % multiple_of:
        raise MoepressError(f"{new} experts per layer is not a multiple of {multiple_of}")
    return old, new


def check_router(layer: MoELayer, experts: int) -> None:
    """Whether this layer's router can choose from so many experts of its own."""
    view = layer.router
    if view.top_k > experts:
        raise MoepressError(f"layer {layer.name!r} chooses {view.top_k} experts per token and cannot do with {experts}")
    if experts % view.groups:
        raise MoepressError(
            f"layer {layer.name!r} routes in {view.groups} groups of equal size: {experts} experts do not divide"
        )
    reach = experts // view.groups * view.topk_groups
    if view.groups > 1 and view.top_k > reach:
        raise MoepressError(
            f"layer {layer.name!r} chooses {view.top_k} experts per token from {view.topk_groups} of {view.groups} "
            f"groups, which hold only {reach} of {experts}"
        )


def _is_identity(layer: MoELayer) -> bool:
    expert_map = layer.adapter.expert_map(layer.block)
    if expert_map is None:
        return True
    in_order = torch.arange(expert_map.numel(), device=expert_map.device)
    return layer.bank.num_experts == expert_map.numel() and bool((expert_map == in_order).all())


def _all_equal(counts: Mapping[str, int]) -> None:
    if len(set(counts.values())) > 1:
        least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        raise MoepressError(
            f"the original format has one number of experts for all layers: {least!r} has {counts[least]} and "
            f"{most!r} has {counts[most]}"
        )


def _plain_config(model: PreTrainedModel, specs: Mapping[str, CompactSpec]) -> PreTrainedConfig:
    config = copy.deepcopy(model.config)
    if compact_specs(model):
        del config.quantization_config
    layers = [layer for layer in find_layers(model) if takes_capacity(layer)]
    capacities = {specs[layer.name].capacity if layer.name in specs else layer.router.capacity for layer in layers}
    if len(capacities) > 1:
        raise MoepressError("the original format has one expert capacity for all layers, and this model has several")
    if capacities:
        config.expert_capacity = capacities.pop() or NO_LIMIT
    return config


def takes_capacity(layer: MoELayer) -> bool:
    """Whether the config limits how many tokens an expert of this layer takes."""
    return bool(getattr(layer.adapter, "takes_capacity", lambda _: False)(layer.block))


def _empty(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """The native model of this config without weights."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(model.dtype)
        with torch.device("meta"):
            plain = type(model)(config)
    finally:
        torch.set_default_dtype(before)
    if model.can_generate():
        plain.generation_config = copy.deepcopy(model.generation_config)
    return plain.eval()


def _fill(plain: PreTrainedModel, state: dict[str, Tensor]) -> None:
    """Give a model these weights: all of its own and no other, each of the shape that its class gives it."""
    try:
        plain.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        first = [line.strip() for line in str(error).splitlines() if line.strip()][1]
        raise MoepressError(f"the original format of {type(plain).__name__} cannot hold this model: {first}") from error
    plain.tie_weights()
