"""Decomposed experts in every family: what they compute, how they are saved and loaded."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moepress.checkpoint.compact import compact_specs, save_compact
from moepress.checkpoint.headers import read_headers
from moepress.checkpoint.load import load_model, load_skeleton
from moepress.checkpoint.sizes import sizes_of
from moepress.decompose.layer import factor_layer, prune_layer
from moepress.models.find import find_layers
from moepress.models.layer import CompactSpec, MoELayer

from .families import WORKING
from .squeeze import apart, assert_same_files, assert_same_tensors, build, loaded_from_files, logits, silent, squeeze  # noqa: F401
from .test_compact import assert_refused

pytestmark = pytest.mark.filterwarnings("ignore:this version of transformers runs NLLB")
RANK = 8
SMALL = ["qwen3_moe", "gpt_oss", "nemotron_h", "switch_transformers", "nllb_moe", "llama4", "longcat_flash", "jetmoe"]


def merged(model: Any, router: str) -> dict[str, CompactSpec]:
    """A merged model, or one with all of its experts."""
    if router != "whole":
        return squeeze(model, router)
    return {x.name: CompactSpec(x.num_experts, x.num_experts, "rows", x.router.capacity) for x in find_layers(model)}


def decompose(
    model: Any, specs: dict[str, CompactSpec], along: str = "columns", rank: int = RANK
) -> dict[str, CompactSpec]:
    """With the whole of S."""
    layers = {layer.name: layer for layer in find_layers(model)}
    return {name: factor_layer(layers[name], spec, rank, along) for name, spec in specs.items()}


def prune(model: Any, specs: dict[str, CompactSpec], share: float, seed: int = 0) -> dict[str, CompactSpec]:
    """Random rows of S stay, another number in every expert; the first expert of each layer keeps none."""
    generator = torch.Generator().manual_seed(seed)
    pruned = {}
    for layer in find_layers(model):
        if layer.name in specs:
            pruned[layer.name] = prune_layer(layer, specs[layer.name], chosen(layer, share, generator))
    return pruned


def chosen(layer: MoELayer, share: float, generator: torch.Generator) -> dict[str, Tensor]:
    factors = layer.adapter.factors(layer.block)
    assert factors is not None
    kept = {}
    for name, matrix in factors.matrices().items():
        kept[name] = torch.rand(len(matrix.index), generator=generator) < share
        kept[name][: matrix.bounds()[1]] = False
    return kept


def multiplied_out(original: Any, model: Any) -> Any:
    """The original architecture with the experts of the decomposed model, UV + S, written out whole."""
    plain = copy.deepcopy(original)
    small = {layer.name: layer for layer in find_layers(model)}
    for layer in find_layers(plain):
        layer.adapter.write_bank(layer.block, small[layer.name].bank)
    return plain


@pytest.mark.parametrize("name", WORKING)
@pytest.mark.parametrize("along", ["columns", "rows"])
def test_a_whole_s_changes_nothing_and_a_pruned_one_is_uv_plus_s(name: str, along: str) -> None:
    original = build(name)
    model = copy.deepcopy(original)
    router = "redirect" if along == "columns" else "whole"
    specs = merged(model, router)
    whole = copy.deepcopy(model)
    before = logits(model, name)
    specs = decompose(model, specs, along)
    assert apart(logits(model, name), before) <= 1e-5 * max(1.0, float(before.abs().max()))
    specs = prune(model, specs, 0.3)
    expected = multiplied_out(whole, model)
    after = logits(model, name)
    assert apart(after, before) > 1e-3
    assert apart(after, logits(expected, name)) <= 1e-5 * max(1.0, float(after.abs().max()))
    assert apart(logits(pickle.loads(pickle.dumps(copy.deepcopy(model))), name), after) == 0
    for layer in find_layers(model):
        factors = layer.adapter.factors(layer.block)
        assert factors is not None and factors.shape() == specs[layer.name].factors
        assert layer.adapter.refusal(layer.block) is None


@pytest.mark.parametrize("name", WORKING)
@pytest.mark.parametrize("router", ["redirect", "rows", "whole"])
def test_round_trip(name: str, router: str, tmp_path: Path) -> None:
    model = loaded_from_files(name, tmp_path / "source", fused=router != "redirect")
    specs = merged(model, router)
    along = "rows" if router == "rows" else "columns"
    specs = prune(model, decompose(model, specs, along), 0.3)
    before = logits(model, name)
    shards = "20KB" if router == "redirect" else "1GB"
    save_compact(model, specs, tmp_path / "first", max_shard_size=shards)
    loaded = load_model(tmp_path / "first")
    assert compact_specs(loaded) == specs
    assert_same_tensors(loaded, model)
    assert apart(logits(loaded, name), before) <= 1e-5
    loaded.save_pretrained(tmp_path / "second", max_shard_size=shards)
    assert_same_files(tmp_path / "first", tmp_path / "second")
    skeleton = load_skeleton(tmp_path / "first")
    assert sizes_of(skeleton).expert_bytes == sizes_of(loaded).expert_bytes == sizes_of(model).expert_bytes
    assert data_bytes(tmp_path / "first") == sizes_of(loaded).bytes
    if router == "redirect":
        assert_refused(tmp_path / "first")


def data_bytes(folder: Path) -> int:
    """What the files hold beside their headers."""
    entries = read_headers(folder.glob("*.safetensors")).values()
    return sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries)
