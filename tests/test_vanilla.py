"""Vanilla export: what stock transformers takes for a checkpoint of the original family."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, DbrxConfig, PreTrainedModel

from moepress.checkpoint.compact import attach, save_compact
from moepress.checkpoint.counts import expert_counts, set_expert_count
from moepress.checkpoint.load import load_model
from moepress.checkpoint.vanilla import expand_to_vanilla, save_vanilla
from moepress.errors import MoepressError
from moepress.models.find import find_layers
from moepress.models.layer import CompactSpec
from tests import zoo
from tests.squeeze import (  # noqa: F401
    apart,
    assert_same_files,
    assert_same_tensors,
    build,
    logits,
    redirect,
    silent,
    squeeze,
)

pytestmark = pytest.mark.filterwarnings("ignore:this version of transformers runs NLLB")


def assert_no_trace(folder: Path) -> None:
    for file in folder.iterdir():
        content = file.read_bytes()
        assert b"moepress" not in content, file.name
        assert b"expert_map" not in content, file.name
        assert b"quantization_config" not in content, file.name


def stock(folder: Path) -> PreTrainedModel:
    """Loaded by its own class, with nothing missing and nothing left over."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, report = getattr(transformers, architecture, transformers.AutoModelForCausalLM).from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report.values()), report
    return model


WRONG_IN_TRANSFORMERS = {
    "nllb_moe": "runs its experts 0 and 1 only, whatever the router chooses",
    "zaya": "writes over the selection biases that it has loaded",
}
"""Families that plain transformers 5.17 to 5.23 loads or runs wrongly: its result is no reference."""

DIFFERENT = (  # one of each layout, router and place of the count; the others are like one of them
    "mixtral", "qwen3_moe", "gemma4", "jamba", "glm4v_moe", "deepseek_v2", "deepseek_v3", "deepseek_v4", "gpt_oss",
    "granitemoe", "phimoe", "nemotron_h", "ernie4_5_moe", "ernie4_5_vl_moe", "longcat_flash", "zaya", "inkling", "dbrx",
    "aria", "jetmoe", "llama4", "step3p7", "switch_transformers", "nllb_moe",
)  # fmt: skip
EVERY = [pytest.param(name, marks=[] if name in DIFFERENT else [pytest.mark.slow]) for name in zoo.FAMILIES]


@pytest.mark.parametrize("name", EVERY)
def test_equally_many_rows(name: str, tmp_path: Path) -> None:
    model = build(name)
    if not find_layers(model)[0].adapter.vanilla:
        pytest.skip("this family has no vanilla form with fewer experts")
    before = set(model.state_dict())
    specs = squeeze(model, "rows", (4,))
    expected = logits(model, name)
    save_vanilla(model, specs, tmp_path / "a")
    assert_no_trace(tmp_path / "a")
    assert apart(logits(model, name), expected) == 0  # the model itself stays as it is
    loaded = stock(tmp_path / "a")
    assert set(loaded.state_dict()) <= before
    counts = set(expert_counts(AutoConfig.from_pretrained(tmp_path / "a")).values())
    assert {spec.physical for spec in specs.values()} <= counts
    if name not in WRONG_IN_TRANSFORMERS:
        assert apart(logits(loaded, name), expected) <= 1e-5


@pytest.mark.parametrize("name", EVERY)
def test_duplicated_experts(name: str, tmp_path: Path) -> None:
    model = build(name)
    counts = expert_counts(model.config)
    attach(model, squeeze(model, "redirect"))
    expected = logits(model, name)
    save_vanilla(model, None, tmp_path / "a", duplicate=True)
    assert_no_trace(tmp_path / "a")
    assert apart(logits(model, name), expected) == 0
    loaded = stock(tmp_path / "a")
    assert expert_counts(loaded.config) == counts
    if name not in WRONG_IN_TRANSFORMERS:
        assert apart(logits(loaded, name), expected) <= 1e-5


STOCK = """
import sys, torch
from transformers import AutoModelForCausalLM
from safetensors.torch import load_file
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
example = load_file(sys.argv[2])
with torch.no_grad():
    distance = (model(example["ids"]).logits - example["logits"]).abs().max()
assert "moepress" not in sys.modules
print(float(distance))
"""


def test_in_a_process_without_moepress(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = build("qwen3_moe")
    save_vanilla(model, squeeze(model, "rows", (4,)), tmp_path / "a")
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        save_file({"ids": ids, "logits": model(ids).logits}, tmp_path / "example")
    command = [sys.executable, "-c", STOCK, str(tmp_path / "a"), str(tmp_path / "example")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert float(run.stdout) <= 1e-5


# ---- from a compact checkpoint ---------------------------------------------------------------------------------------


def test_from_a_loaded_compact_checkpoint(tmp_path: Path) -> None:
    model = build("mixtral")
    specs = squeeze(model, "rows", (4,))
    save_vanilla(model, specs, tmp_path / "direct")
    save_compact(model, specs, tmp_path / "compact")
    save_vanilla(load_model(tmp_path / "compact"), None, tmp_path / "later")
    assert_same_files(tmp_path / "direct", tmp_path / "later")
    assert any("block_sparse_moe.experts.3.w1" in name for name in load_file(tmp_path / "later" / "model.safetensors"))


def test_per_expert_names_also_from_fused_files(tmp_path: Path) -> None:
    """Other engines know the names of the original checkpoints only."""
    build("qwen3_moe").save_pretrained(tmp_path / "fused", save_original_format=False)
    model = load_model(tmp_path / "fused")
    save_vanilla(model, squeeze(model, "rows", (4,)), tmp_path / "a")
    names = set(load_file(tmp_path / "a" / "model.safetensors"))
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in names
    assert not any("gate_up_proj" in name for name in names)


def test_bfloat16_and_shards(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path / "source")
    model = load_model(tmp_path / "source", dtype=torch.bfloat16)
    save_vanilla(model, squeeze(model, "rows", (4,)), tmp_path / "a", max_shard_size="20KB")
    assert (tmp_path / "a" / "model.safetensors.index.json").exists()
    loaded = stock(tmp_path / "a")
    assert loaded.dtype == torch.bfloat16
    assert_same_tensors(loaded, model)


def test_dtypes_that_differ_survive(tmp_path: Path) -> None:
    """Families keep some tensors in fp32 whatever the rest is."""
    build("deepseek_v3").save_pretrained(tmp_path / "source")
    model = load_model(tmp_path / "source", dtype=torch.bfloat16)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert model.state_dict()[bias].dtype == torch.float32
    compact = copy.deepcopy(model)
    save_vanilla(compact, squeeze(compact, "redirect"), tmp_path / "a", duplicate=True)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    assert tensors[bias].dtype == torch.float32
    assert tensors["model.layers.1.mlp.experts.7.up_proj.weight"].dtype == torch.bfloat16


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = build("lfm2_moe")
    save_vanilla(model, squeeze(model, "rows", (4,)), tmp_path / "a")
    assert "lm_head.weight" not in load_file(tmp_path / "a" / "model.safetensors")
    loaded = stock(tmp_path / "a")
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_an_identity_redirect_is_as_good_as_rows(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    original = copy.deepcopy(model)
    specs = {}
    for layer in find_layers(model):
        specs[layer.name] = CompactSpec(8, 8)
        bank = layer.bank.map(lambda _, tensor: tensor.clone())
        layer.adapter.reshape(layer.block, specs[layer.name])
        layer.adapter.write_bank(layer.block, bank)
        layer.adapter.expert_map(layer.block).copy_(torch.arange(8))  # type: ignore[union-attr]
    save_vanilla(model, specs, tmp_path / "a")
    original.save_pretrained(tmp_path / "b")
    assert_same_files(tmp_path / "a", tmp_path / "b")


def test_duplicates_are_not_views() -> None:
    model = build("qwen3_moe")
    attach(model, squeeze(model, "redirect"))
    full = expand_to_vanilla(model)
    expected = logits(model, "qwen3_moe")
    with torch.no_grad():
        for layer in find_layers(full):
            for parameter in layer.block.parameters():
                parameter.zero_()
    assert apart(logits(model, "qwen3_moe"), expected) == 0


# ---- what the original format cannot say -----------------------------------------------------------------------------


def refused(message: str, model: PreTrainedModel, specs: dict[str, CompactSpec], **options: object) -> None:
    with pytest.raises(MoepressError, match=message):
        save_vanilla(model, specs, "/nonexistent/never/written", **options)  # type: ignore[arg-type]


def test_refusals() -> None:
    model = build("qwen3_moe")
    specs = squeeze(model, "redirect")
    refused("redirects 8 router rows to 3 experts", model, specs)
    model = build("qwen3_moe")
    specs = squeeze(model, "rows", (3, 5))
    refused("'model.layers.1.mlp' has 3 and 'model.layers.2.mlp' has 5", model, specs)
    refused("nothing to duplicate", model, specs, duplicate=True)
    model = build("qwen3_moe")
    first = find_layers(model)[0]
    specs = {first.name: redirect(first, 8, torch.Generator().manual_seed(0))}
    refused("redirects 8 router rows to 8 experts", model, specs)  # in another order
    model = build("qwen3_moe")
    specs = squeeze(model, "rows", (6,))
    refused("6 experts per layer is not a multiple of 4", model, specs, multiple_of=4)
    model = build("jetmoe")
    specs = squeeze(model, "redirect", (8,))
    refused("has no vanilla form", model, specs)


def test_a_layer_left_whole_is_counted() -> None:
    model = build("qwen3_moe")
    specs = squeeze(model, "rows", (4, 8))
    specs.popitem()
    refused("has 4 and .* has 8", model, specs)


def test_routers_that_cannot() -> None:
    from moepress.checkpoint.vanilla import check_router

    deepseek = find_layers(build("deepseek_v3"))[0]  # 2 groups, 1 of them chosen, 3 experts per token
    for experts, message in [(2, "chooses 3 experts per token and cannot do with 2"), (5, "5 experts do not divide"),
                             (4, "from 1 of 2 groups, which hold only 2 of 4")]:  # fmt: skip
        with pytest.raises(MoepressError, match=message):
            check_router(deepseek, experts)
    check_router(deepseek, 6)


@pytest.mark.parametrize("capacity", [None, 3])
def test_expert_capacity_is_kept(capacity: int | None, tmp_path: Path) -> None:
    """Whatever it means to the installed transformers, the config says what the compact layers did."""
    model = build("switch_transformers")
    specs = {}
    for layer in find_layers(model):
        specs[layer.name] = CompactSpec(8, 8, "rows", capacity)
        state = copy.deepcopy(layer.block.state_dict())
        layer.adapter.reshape(layer.block, specs[layer.name])
        layer.block.load_state_dict(state)
    save_vanilla(model, specs, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.expert_capacity == capacity if capacity else config.expert_capacity > 100_000
    specs[next(iter(specs))] = CompactSpec(8, 8, "rows", 5)
    refused("one expert capacity for all layers", model, specs)


# ---- counts in configs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_every_config_says_how_many_experts(name: str, tmp_path: Path) -> None:
    config = zoo.FAMILIES[name].config()
    assert set(expert_counts(config).values()) == {zoo.NUM_EXPERTS}
    set_expert_count(config, zoo.NUM_EXPERTS, 4)
    config.save_pretrained(tmp_path)
    assert set(expert_counts(type(config).from_pretrained(tmp_path)).values()) == {4}


def test_counts_in_lists_and_nested_configs() -> None:
    config = transformers.Qwen3MoeConfig(num_experts=8)
    config.audio = {"moe_num_experts": [8, 8], "num_experts": 6, "n_routed_experts": [8, 6]}
    assert sorted(expert_counts(config).values()) == [6, 8, 8]
    changed = set_expert_count(config, 8, 4)
    assert len(changed) == 2 and "audio.moe_num_experts" in changed
    assert config.audio == {"moe_num_experts": [4, 4], "num_experts": 6, "n_routed_experts": [8, 6]}
    assert config.num_experts == 4
    with pytest.raises(MoepressError, match="says nowhere that there are 5 experts"):
        set_expert_count(config, 5, 2)
    dbrx = DbrxConfig(ffn_config={"moe_num_experts": 8})
    assert set_expert_count(dbrx, 8, 2) == ["ffn_config.moe_num_experts"]
