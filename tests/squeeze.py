"""Compress a tiny model in a random but valid way, for tests of everything that comes after."""

from __future__ import annotations

import copy
import filecmp
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moepress.checkpoint.compact import save_compact
from moepress.checkpoint.load import load_model, quiet
from moepress.errors import UnsupportedModel
from moepress.models.find import find_layers
from moepress.models.layer import CompactSpec, MoELayer
from tests import zoo

COUNTS = (3, 5, 2, 6)
"""Experts kept in the first layers; different on purpose."""


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """Without the progress bars and logs of transformers. Importing it into a test file is enough."""
    with quiet():
        yield


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """A zoo model whose layers are all supported; others skip the test."""
    model = zoo.build(name, seed)
    try:
        find_layers(model)
    except UnsupportedModel as error:
        pytest.skip(str(error))
    return model


def loaded_from_files(name: str, folder: Path, fused: bool) -> PreTrainedModel:
    """A model as users have them: loaded from files that hold each expert apart, or all of a layer in one."""
    model = build(name)
    model.save_pretrained(folder, save_original_format=not fused)
    return load_model(folder)


def squeeze(
    model: PreTrainedModel, router: str, counts: tuple[int, ...] = COUNTS, seed: int = 0
) -> dict[str, CompactSpec]:
    """Keep random experts, with a random redirect or with the kept experts' router rows; returns the specs."""
    generator = torch.Generator().manual_seed(seed)
    specs = {}
    for i, layer in enumerate(find_layers(model)):
        count = counts[i % len(counts)]
        specs[layer.name] = (redirect if router == "redirect" else cut)(layer, count, generator)
    return specs


def saved(name: str, folder: Path, router: str = "redirect") -> PreTrainedModel:
    """A compact checkpoint in `folder`; returns the model in memory."""
    model = build(name)
    save_compact(model, squeeze(model, router), folder)
    return model


def redirect(layer: MoELayer, count: int, generator: torch.Generator) -> CompactSpec:
    spec = CompactSpec(layer.num_experts, count)
    kept = torch.randperm(spec.experts, generator=generator)[:count]
    bank = layer.bank.select(kept).map(lambda _, tensor: tensor.clone())
    extra = torch.randint(count, (spec.experts - count,), generator=generator)
    order = torch.randperm(spec.experts, generator=generator)
    layer.adapter.reshape(layer.block, spec)
    layer.adapter.write_bank(layer.block, bank)
    expert_map = layer.adapter.expert_map(layer.block)
    assert expert_map is not None
    expert_map.copy_(torch.cat([torch.arange(count), extra])[order])
    return spec


def cut(layer: MoELayer, count: int, generator: torch.Generator) -> CompactSpec:
    if reason := layer.adapter.rows_refusal(layer.block):
        pytest.skip(reason)
    view = layer.router
    if view.groups > 1:  # equally many from every group, and enough for its router
        size = layer.num_experts // view.groups
        count = (size - 1) * view.groups
        kept = torch.arange(layer.num_experts).view(view.groups, size)[:, 1:].flatten()
    else:
        count = max(count, view.top_k)
        kept = torch.randperm(layer.num_experts, generator=generator)[:count].sort().values
    spec = CompactSpec(layer.num_experts, count, "rows")
    bank = layer.bank.select(kept).map(lambda _, tensor: tensor.clone())
    # fixed rows follow the experts' own
    rows = {name: torch.cat([t[kept], t[spec.experts :]]) for name, t in view.tensors.items()}
    layer.adapter.reshape(layer.block, spec)
    layer.adapter.write_bank(layer.block, bank)
    layer.adapter.write_router(layer.block, rows)
    return spec


def duplicated(original: PreTrainedModel, compact: PreTrainedModel) -> PreTrainedModel:
    """The original architecture in which each expert has the weights of the physical expert that stands for it."""
    model = copy.deepcopy(original)
    small = {layer.name: layer for layer in find_layers(compact)}
    for layer in find_layers(model):
        other = small[layer.name]
        expert_map = other.adapter.expert_map(other.block)
        assert expert_map is not None
        layer.adapter.write_bank(layer.block, other.bank.select(expert_map))
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, name: str, seed: int = 0) -> Tensor:
    torch.manual_seed(0)
    inputs = zoo.batch(model, name, seed)
    return model(**inputs).logits.float()


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def assert_same_tensors(a: PreTrainedModel, b: PreTrainedModel) -> None:
    ours, theirs = _tensors(a), _tensors(b)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def _tensors(model: PreTrainedModel) -> dict[str, Any]:
    return {**model.state_dict(), **dict(model.named_buffers())}


def assert_same_files(a: Path, b: Path) -> None:
    names = sorted(entry.name for entry in a.iterdir())
    assert names == sorted(entry.name for entry in b.iterdir())
    assert [name for name in names if not filecmp.cmp(a / name, b / name, shallow=False)] == []
