"""The whole way: a model in, a smaller checkpoint out, which loads and computes what it should."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

import moepress
from moepress.checkpoint.sizes import disk_bytes, predicted_sizes
from moepress.errors import MoepressError
from moepress.models.find import find_layers
from moepress.models.layer import CompactSpec
from moepress.observe import Statistics
from moepress.pipeline import press
from moepress.plan import SIMILARITIES, Plan
from moepress.recipe import make_recipe

from . import zoo
from .test_observe import calibration


def pressed(name: str, **given):
    model = zoo.build(name)
    recipe = make_recipe({"method": "m-smoe", "keep": 4, **given})
    return model, press(model, recipe, lambda: calibration(name, model))


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "switch_transformers", "llama4"])
def test_redirect_equals_the_original_with_merged_weights_in_every_slot(name):
    model, outcome = pressed(name)
    slots = zoo.without_capacity(zoo.build(name))
    for layer, slot in zip(find_layers(model), find_layers(slots), strict=True):
        where = outcome.plan.of(layer.name).expert_map()
        slot.adapter.write_bank(slot.block, layer.bank.select(where))
    inputs = zoo.batch(model, name)
    with torch.no_grad():
        assert torch.allclose(model(**inputs).logits, slots(**inputs).logits, atol=1e-5)


@pytest.mark.parametrize("router", ["redirect", "keep", "mean"])
@pytest.mark.parametrize("similarity", SIMILARITIES.names())
def test_every_similarity_and_router_action_runs(router, similarity):
    model, _ = pressed("qwen3_moe", **{"plan.similarity": similarity, "router": router, "plan.budget": "uniform"})
    assert {layer.bank.num_experts for layer in find_layers(model)} == {4}
    with torch.no_grad():
        assert torch.isfinite(model(**zoo.batch(model, "qwen3_moe")).logits).all()
    again, _ = pressed("qwen3_moe", **{"plan.similarity": similarity, "router": router, "plan.budget": "uniform"})
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


def test_aligning_to_the_first_changes_no_output():
    model = zoo.build("mixtral")
    before = copy.deepcopy(model)
    outcome = press(
        model, make_recipe({"method": "m-smoe", "keep": 1.0, "preset": "paper"}), lambda: calibration("mixtral", model)
    )
    inputs = zoo.batch(model, "mixtral")
    with torch.no_grad():
        assert torch.allclose(model(**inputs).logits, before(**inputs).logits, atol=1e-5)
    assert not outcome.specs


def test_identical_experts_merge_without_loss():
    model = zoo.build("qwen3_moe")
    for layer in find_layers(model):
        layer.adapter.write_bank(layer.block, layer.bank.select([0] * layer.num_experts))
    original = copy.deepcopy(model)
    press(model, make_recipe({"method": "m-smoe", "keep": 2}), lambda: calibration("qwen3_moe", model))
    inputs = zoo.batch(model, "qwen3_moe")
    with torch.no_grad():
        assert torch.allclose(model(**inputs).logits, original(**inputs).logits, atol=1e-5)


def test_saved_statistics_and_an_edited_plan_replace_their_stages(tmp_path):
    model, outcome = pressed("qwen3_moe")
    outcome.statistics.save(tmp_path / "s")
    outcome.plan.save(tmp_path / "p.json")
    other = zoo.build("qwen3_moe")
    again = press(other, outcome.recipe, lambda: [], statistics=Statistics.load(tmp_path / "s"))
    assert again.plan == outcome.plan
    edited = zoo.build("qwen3_moe")
    press(edited, outcome.recipe, lambda: [], plan=Plan.load(tmp_path / "p.json"))
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), edited.state_dict().values(), strict=True)
    )


def test_saved_statistics_must_fit(tmp_path):
    _, outcome = pressed("qwen3_moe")
    other = zoo.build("qwen3_moe")
    lacking = make_recipe({"keep": 4, "method": "reap", "sequential": False})
    with pytest.raises(MoepressError, match="hold no 'output-norm'"):
        press(other, lacking, lambda: [], statistics=outcome.statistics)
    with pytest.raises(MoepressError, match="for layer"):
        press(zoo.build("switch_transformers"), outcome.recipe, lambda: [], statistics=outcome.statistics)
    with pytest.raises(MoepressError, match="cannot use saved ones"):
        press(other, make_recipe({"keep": 4, "method": "reap"}), lambda: [], statistics=outcome.statistics)


def test_an_edited_plan_is_carried_out_by_sequential_methods_too():
    _, outcome = pressed("mixtral", method="reap")
    model = zoo.build("mixtral")
    again = press(model, outcome.recipe, lambda: calibration("mixtral", model), plan=outcome.plan)
    assert again.plan == outcome.plan and {spec.physical for spec in again.specs.values()} == {4}


@pytest.mark.parametrize(
    "given, message",
    [
        ({"keep": 9}, "more than the 8 experts"),
        ({"keep": 0.05}, "less than one"),
        ({"keep": 1, "router": "keep", "plan.budget": "uniform"}, "at least"),
        ({"keep": None}, "say how small"),
        ({"keep": 4, "target_size": "1GB"}, "say how small"),
        ({"keep": None, "target_size": "1kB"}, "it would be"),
        ({"format": "vanilla", "router": "redirect"}, "vanilla"),
        ({"format": "vanilla", "plan.budget": "adaptive"}, "one expert count"),
        ({"capacity": 4}, "no expert capacity"),
        ({"plan.skip": ["model.layers.9"]}, "there is no MoE layer"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_text_is_read(given, message):
    model = zoo.build("qwen3_moe")

    def never():
        raise AssertionError("calibration started")

    with pytest.raises(MoepressError, match=message):
        press(model, make_recipe({"method": "m-smoe", "keep": 4, **given}), never)


def test_a_count_that_the_rounding_changes_is_said():
    for keep, near in ((4, "keep 3 or 6"), (2, "keep 3")):
        with pytest.raises(MoepressError, match=f"keep={keep} is not a multiple of 3 .*: {near}$"):
            pressed("qwen3_moe", method="reap", keep=keep, multiple_of=3)
    _, outcome = pressed("qwen3_moe", method="reap", keep=0.5, multiple_of=3)
    assert {layer.physical for layer in outcome.plan.layers} == {3}
    assert outcome.notes == ["every layer keeps 3 experts, not 4: its router or multiple_of wants that"]
    _, outcome = pressed("qwen3_moe", method="reap", keep=3, multiple_of=3)
    assert outcome.notes == []


def test_weights_that_are_not_finite_are_refused():
    model = zoo.build("qwen3_moe")
    find_layers(model)[1].bank.down_EDF[0, 0, 0] = float("inf")
    with pytest.raises(MoepressError, match="not finite"):
        press(model, make_recipe({"keep": 4}), lambda: [])


@pytest.mark.parametrize("form", ["compact", "vanilla"])
def test_files_are_smaller_and_load(tmp_path, demo_model, calibration_file, form):
    out = tmp_path / "small"
    result = moepress.compress(demo_model, out, keep=8, format=form, calibration=str(calibration_file), **{
        "calibration.samples": 8, "calibration.length": 64})  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.randint(3, 8000, (2, 32))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, result.model(ids).logits)
    assert {file.stat().st_mode & 0o777 for file in out.iterdir() if file.is_file()} == {0o666 & ~umask()}
    assert disk_bytes(out) < 1.02 * result.after.bytes + 100_000
    assert result.after.bytes < 0.7 * result.before.bytes
    records = out / "moepress" if form == "compact" else out.with_name("small.moepress")
    report = json.loads((records / "report.json").read_text())
    assert report["after"]["parameters"] == sum(p.numel() for p in loaded.parameters())
    assert Plan.load(records / "plan.json") == result.outcome.plan
    if form == "vanilla":
        assert "moepress" not in (out / "config.json").read_text() and loaded.config.num_experts == 8


def test_target_size_is_kept(tmp_path, demo_model, calibration_file):
    out = tmp_path / "small"
    moepress.compress(demo_model, out, target_size="6MB", calibration=str(calibration_file), **{
        "calibration.samples": 8, "calibration.length": 64})  # fmt: skip
    assert 5.5e6 < disk_bytes(out) < 6.1e6


def test_a_compact_model_is_not_compressed_twice(tmp_path, demo_model, calibration_file):
    options = {"calibration.samples": 4, "calibration.length": 64}
    moepress.compress(demo_model, tmp_path / "a", keep=8, calibration=str(calibration_file), **options)
    with pytest.raises(MoepressError, match="compact one already"):
        moepress.compress(tmp_path / "a", tmp_path / "b", keep=4, calibration=str(calibration_file), **options)
    assert not (tmp_path / "b").exists()


def test_switch_base_32_counts_as_in_the_paper():
    """An average of 8 of 32 experts with the first encoder MoE layer whole: 733 M parameters."""
    config = SwitchTransformersConfig(
        d_model=768, d_ff=3072, d_kv=64, num_heads=12, num_layers=12, num_decoder_layers=12, num_experts=32,
        num_sparse_encoder_layers=6, num_sparse_decoder_layers=6, vocab_size=32128, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = SwitchTransformersForConditionalGeneration(config)
    layers = find_layers(model)
    assert len(layers) == 12 and layers[0].stack == "encoder"
    specs = {layer.name: CompactSpec(32, 8) for layer in layers[1:]}
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1.98e9, rel=0.005)
    assert predicted_sizes(model, specs).parameters == pytest.approx(733e6, rel=0.001)


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.fixture
def demo_model() -> Path:
    return Path(moepress.__file__).parent / "assets" / "demo-moe"


@pytest.fixture
def calibration_file() -> Path:
    return Path(moepress.__file__).parent / "assets" / "demo-text.jsonl"
