"""The methods that decompose, from the recipe to the files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import moepress
from moepress.checkpoint.compact import attach
from moepress.checkpoint.load import load_model
from moepress.checkpoint.sizes import disk_bytes, sizes_of
from moepress.checkpoint.vanilla import save_vanilla
from moepress.data import window_batches
from moepress.decompose.importance import factored_matrices
from moepress.decompose.stable_rank import stable_ranks
from moepress.errors import MoepressError
from moepress.estimate import estimate
from moepress.inspection import inspect_model
from moepress.models.find import find_layers
from moepress.pipeline import Outcome, press
from moepress.recipe import make_recipe

from . import zoo
from .squeeze import apart, logits, silent  # noqa: F401

IDS = torch.randint(3, 96, (24, 10), generator=torch.Generator().manual_seed(0))
SMALL: dict[str, Any] = {"decompose.rank": 4}


def pressed(name: str, method: str, **given: Any) -> tuple[Any, Outcome]:
    model = zoo.build(name)
    if name == "switch_transformers":
        model.config.decoder_start_token_id = 0
    size = {} if method == "c-smoe" else {"keep": 4}
    small = {} if method == "m-smoe" else SMALL
    recipe = make_recipe({"method": method} | size | small | given)
    return model, press(model, recipe, lambda: window_batches(IDS, model.config, batch_size=6))


def share_of_s(model: Any) -> float:
    matrices = factored_matrices(model).values()
    left = sum(len(m.index) * m.packed_Px.shape[1] for m in matrices)
    return left / sum(m.experts * m.choices * m.packed_Px.shape[1] for m in matrices)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h", "switch_transformers", "llama4"])
@pytest.mark.parametrize("method", ["mc-smoe", "c-smoe"])
@pytest.mark.parametrize("preset", [None, "paper_code"])
def test_every_layer_gets_smaller(name: str, method: str, preset: str | None) -> None:
    model, outcome = pressed(name, method, **({"preset": preset} if preset else {}))
    skipped = {layer.name for layer in outcome.plan.layers} - set(outcome.specs)
    assert len(skipped) == (name == "switch_transformers")  # its first layer stays whole
    assert 0.09 < share_of_s(model) <= 0.1
    kept = [spec.physical for spec in outcome.specs.values()]
    assert sum(kept) == (4 if method == "mc-smoe" else 8) * len(kept)
    along = "rows" if preset else "columns"
    assert {spec.factors.along for spec in outcome.specs.values() if spec.factors} == {along}
    assert torch.isfinite(logits(model, name)).all()
    attach(model, outcome.specs)
    again, _ = pressed(name, method, **({"preset": preset} if preset else {}))
    assert apart(logits(model, name), logits(again, name)) == 0


@pytest.mark.parametrize("method", ["mc-smoe", "c-smoe"])
def test_a_ratio_of_one_loses_nothing_but_what_merging_lost(method: str) -> None:
    model, _ = pressed("qwen3_moe", method, **{"decompose.ratio": 1, "plan.skip": "none"})
    expected = zoo.build("qwen3_moe")
    if method == "mc-smoe":
        expected, _ = pressed("qwen3_moe", "m-smoe")
    assert share_of_s(model) == 1
    assert apart(logits(model, "qwen3_moe"), logits(expected, "qwen3_moe")) <= 1e-4


def test_16_bit_weights_stay_what_they_are() -> None:
    model = zoo.build("qwen3_moe").bfloat16()
    recipe = make_recipe({"method": "c-smoe", "decompose.ratio": 1} | SMALL)
    before = copy.deepcopy(model)
    press(model, recipe, lambda: window_batches(IDS, model.config))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for layer, old in zip(find_layers(model), find_layers(before), strict=True):
        for name, tensor in layer.bank.tensors().items():  # S makes up for the rounding of U and V
            assert (tensor.float() - old.bank.tensors()[name].float()).abs().max() < 0.02


def test_stable_ranks_are_those_of_the_matrices() -> None:
    original = zoo.build("qwen3_moe")
    merged, plain = pressed("qwen3_moe", "m-smoe")
    _, outcome = pressed("qwen3_moe", "mc-smoe")
    for layer, small in zip(find_layers(original), find_layers(merged), strict=True):
        assert outcome.stable_ranks[layer.name] == {
            "before": stable_ranks(layer.bank),
            "after": stable_ranks(small.bank),
        }
    assert not plain.stable_ranks


@pytest.mark.parametrize("method", ["mc-smoe", "c-smoe"])
def test_from_the_command_to_the_files(method: str, tmp_path: Path) -> None:
    zoo.build("qwen3_moe").save_pretrained(tmp_path / "model")
    from safetensors.torch import save_file

    save_file({"tokens": IDS}, tmp_path / "windows.safetensors")
    given: dict[str, Any] = {"method": method, "calibration": str(tmp_path / "windows.safetensors")} | SMALL
    given |= {} if method == "c-smoe" else {"keep": 4}
    result = moepress.compress(tmp_path / "model", tmp_path / "out", **given)
    loaded = load_model(tmp_path / "out")
    assert apart(logits(loaded, "qwen3_moe"), logits(result.model, "qwen3_moe")) <= 1e-5
    recorded = json.loads((tmp_path / "out" / "moepress" / "stable_rank.json").read_text())
    assert recorded == result.outcome.stable_ranks
    report = json.loads((tmp_path / "out" / "moepress" / "report.json").read_text())
    assert all(0.2 < share < 1 for shares in report["remaining"].values() for share in shares)
    for name, (experts, physical) in report["experts"].items():
        assert [len(report["stable_rank"][name][when]) for when in ("before", "after")] == [experts, physical]
        assert len(report["remaining"][name]) == physical
    assert 0 < disk_bytes(tmp_path / "out") - result.after.bytes < 20_000  # the header
    assert result.after.expert_bytes < (0.4 if method == "mc-smoe" else 0.7) * result.before.expert_bytes
    assert {layer.rank for layer in inspect_model(tmp_path / "out").layers} == {4}
    made = make_recipe(given | {"calibration.source": given.pop("calibration")} if "calibration" in given else given)
    predicted = estimate(tmp_path / "model", made)
    assert abs(predicted.parameters_after - result.after.parameters) < 0.01 * result.after.parameters
    again = moepress.compress(tmp_path / "model", recipe=tmp_path / "out" / "moepress" / "recipe.yaml")
    assert apart(logits(again.model, "qwen3_moe"), logits(result.model, "qwen3_moe")) == 0

    sizes = moepress.export(tmp_path / "out", tmp_path / "vanilla", duplicate=method == "mc-smoe")
    assert sizes.parameters == result.before.parameters
    stock = type(loaded).from_pretrained(tmp_path / "vanilla")
    assert apart(logits(stock, "qwen3_moe"), logits(loaded, "qwen3_moe")) <= 1e-5


@pytest.mark.parametrize("name", ["gpt_oss", "switch_transformers", "dbrx"])
def test_multiplied_out_in_other_layouts(name: str, tmp_path: Path) -> None:
    model, outcome = pressed(name, "c-smoe", **{"plan.skip": "none"})
    attach(model, outcome.specs)
    save_vanilla(model, outcome.specs, tmp_path)
    plain = type(model).from_pretrained(tmp_path)
    assert not any(".factors." in key for key in plain.state_dict())
    assert apart(logits(plain, name), logits(model, name)) <= 1e-5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "m-smoe", "decompose.rank": 4}, "does not use 'decompose.rank'"),
        ({"method": "c-smoe", "keep": 4}, "keeps all experts: leave keep out"),
        ({"method": "c-smoe", "merge.operator": "uniform", "keep": None}, "does not use 'merge.operator'"),
        ({"method": "mc-smoe", "decompose.rank": 24}, "no smaller than its 24 x 32 matrices"),
        ({"method": "mc-smoe", "decompose.rank": 13}, "no smaller than its 24 x 32 matrices"),
        ({"method": "mc-smoe", "decompose.rank": 0}, "decompose.rank"),
        ({"method": "mc-smoe", "decompose.ratio": 2}, "decompose.ratio"),
        ({"method": "mc-smoe", "decompose.along": "diagonals"}, "decompose.along"),
        ({"method": "mc-smoe", "decompose.smoothing": 1}, "decompose.smoothing"),
        ({"method": "mc-smoe", "decompose.rnak": 4}, "did you mean"),
        ({"method": "mc-smoe", "format": "vanilla"}, "export multiplies out"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], words: str) -> None:
    model = zoo.build("qwen3_moe")
    with pytest.raises(MoepressError, match=words):
        press(model, make_recipe({"keep": 4} | given), lambda: pytest.fail("calibrated"))


def test_text_is_missing(tmp_path: Path) -> None:
    zoo.build("qwen3_moe").save_pretrained(tmp_path / "model")
    with pytest.raises(MoepressError, match="calibration text is missing"):
        moepress.compress(tmp_path / "model", method="c-smoe", **SMALL)
    plain = {"decompose.whiten": False, "decompose.ratio": 1}
    assert moepress.compress(tmp_path / "model", method="c-smoe", **SMALL, **plain).outcome.specs


def test_target_size_is_met(tmp_path: Path) -> None:
    before = sizes_of(zoo.build("qwen3_moe"))
    target = int(before.other_bytes + 0.3 * before.expert_bytes)
    model, _ = pressed("qwen3_moe", "mc-smoe", keep=None, target_size=str(target))
    assert 0.8 * target < sizes_of(model).bytes <= target * 1.01
