"""Decomposed experts in every family: what they compute, how they are saved and loaded."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moepress.checkpoint.compact import compact_specs, save_compact
from moepress.checkpoint.headers import read_headers
from moepress.checkpoint.load import load_model, load_skeleton
from moepress.checkpoint.sizes import sizes_of
from moepress.decompose.layer import factor_layer, prune_layer
from moepress.errors import MoepressError
from moepress.models.find import find_layers
from moepress.models.layer import CompactSpec, MoELayer

from . import zoo
from .families import WORKING
from .squeeze import apart, assert_same_files, assert_same_tensors, build, loaded_from_files, logits, silent, squeeze  # noqa: F401
from .test_compact import STOCK, assert_refused

pytestmark = pytest.mark.filterwarnings("ignore:this version of transformers runs NLLB")
RANK = 8
SMALL = ["gpt_oss", "switch_transformers", "nllb_moe", "longcat_flash"]


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


def once(kinds: list[str]) -> list[Any]:
    """Every kind for some families of every layout, one kind for each of the others; the rest is slow."""
    cases = []
    for i, name in enumerate(WORKING):
        for j, kind in enumerate(kinds):
            quick = name in SMALL or i % len(kinds) == j
            cases.append(pytest.param(name, kind, marks=() if quick else pytest.mark.slow))
    return cases


@pytest.mark.parametrize(("name", "along"), once(["columns", "rows"]))
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


@pytest.mark.parametrize(("name", "router"), once(["redirect", "rows", "whole"]))
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


def test_cast_while_loading_and_afterwards(tmp_path: Path) -> None:
    for name in ("qwen3_moe", "switch_transformers"):
        model = build(name)
        save_compact(model, prune(model, decompose(model, merged(model, "redirect")), 0.3), tmp_path / name)
        loaded = load_model(tmp_path / name, dtype=torch.bfloat16)
        kinds = {t.dtype for key, t in loaded.state_dict().items() if ".factors." in key}
        assert kinds == {torch.bfloat16, torch.int32}
        loaded.save_pretrained(tmp_path / f"{name}-narrow")
        assert_same_tensors(load_model(tmp_path / f"{name}-narrow"), loaded)
        assert torch.isfinite(logits(loaded, name)).all()
        wide = load_model(tmp_path / f"{name}-narrow", dtype=torch.float32)
        assert apart(logits(wide, name), logits(model, name)) < 0.1 * float(logits(model, name).abs().max())


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "switch_transformers"])
@pytest.mark.parametrize("way", [{}, {"num_beams": 3}], ids=["greedy", "beam"])
def test_generate(name: str, way: dict[str, Any], tmp_path: Path) -> None:
    original = build(name)
    model = copy.deepcopy(original)
    specs = prune(model, decompose(model, merged(model, "whole")), 0.3)
    save_compact(model, specs, tmp_path)
    plain = multiplied_out(original, model)
    inputs = {key: t for key, t in zoo.batch(model, name, batch=1).items() if not key.startswith("decoder")}
    texts = [m.generate(**inputs, max_new_tokens=6, min_new_tokens=6, **way) for m in (plain, load_model(tmp_path))]
    assert torch.equal(*texts)


def test_nothing_is_left_of_s(tmp_path: Path) -> None:
    """Tensors without entries are saved, loaded and run."""
    model = build("qwen3_moe")
    specs = prune(model, decompose(model, merged(model, "redirect")), 0.0)
    save_compact(model, specs, tmp_path)
    loaded = load_model(tmp_path)
    assert_same_tensors(loaded, model)
    assert apart(logits(loaded, "qwen3_moe"), logits(model, "qwen3_moe")) <= 1e-5


def test_without_moepress_it_does_not_run(tmp_path: Path) -> None:
    """In a process that never heard of it, decomposed with all experts in place."""
    folders = []
    for name in ("qwen3_moe", "switch_transformers"):
        model = build(name)
        save_compact(model, prune(model, decompose(model, merged(model, "whole")), 0.3), tmp_path / name)
        folders.append(str(tmp_path / name))
    run = subprocess.run([sys.executable, "-c", STOCK, *folders], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout) == dict.fromkeys(folders, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, key: t.__setitem__(key("up.offsets"), t[key("up.offsets")] + 1), "offsets"),
        (lambda t, key: t.__setitem__(key("down.index"), t[key("down.index")] + 100), "outside"),
        (lambda t, key: t.pop(key("gate.us")), "incomplete"),
        (lambda t, key: t.__setitem__(key("gate.v"), t[key("gate.v")][:, :4].clone()), "corrupt"),
    ],
    ids=["offsets", "index", "missing", "shape"],
)
def test_a_damaged_checkpoint_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    model = build("qwen3_moe")
    save_compact(model, prune(model, decompose(model, merged(model, "redirect")), 0.3), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors, lambda end: next(name for name in tensors if name.endswith(f"factors.{end}")))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MoepressError, match=words):
        load_model(tmp_path)


def test_a_spec_of_another_kind_is_refused(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    plain = merged(model, "redirect")
    decompose(model, plain)
    with pytest.raises(MoepressError, match="decomposed in another way"):
        save_compact(model, plain, tmp_path)
