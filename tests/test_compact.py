"""Compact checkpoints: every family, saved and loaded, with and without moepress."""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from moepress.checkpoint.compact import attach, compact_specs, detach, save_compact
from moepress.checkpoint.guard import NOTICE
from moepress.checkpoint.load import load_model, load_skeleton
from moepress.checkpoint.quantizer import METHOD
from moepress.checkpoint.sizes import predicted_sizes, sizes_of
from moepress.errors import MoepressError
from moepress.models.find import find_layers
from tests import zoo
from tests.squeeze import (  # noqa: F401
    apart,
    assert_same_files,
    assert_same_tensors,
    build,
    duplicated,
    loaded_from_files,
    logits,
    redirect,
    saved,
    silent,
    squeeze,
)

pytestmark = pytest.mark.filterwarnings("ignore:this version of transformers runs NLLB")


# ---- every family ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.FAMILIES)
@pytest.mark.parametrize("router", ["redirect", "rows"])
def test_round_trip(name: str, router: str, tmp_path: Path) -> None:
    """From per-expert files into shards, and from fused files into one file."""
    original = loaded_from_files(name, tmp_path / "source", fused=router == "rows")
    model = copy.deepcopy(original)
    specs = squeeze(model, router)
    before = logits(model, name)
    if router == "redirect":
        assert apart(before, logits(duplicated(original, model), name)) <= 1e-5

    shards = "60KB" if router == "redirect" else "1GB"
    assert predicted_sizes(original, specs) == sizes_of(model)
    save_compact(model, specs, tmp_path / "first", max_shard_size=shards)
    assert (tmp_path / "first" / "model.safetensors.index.json").exists() == (router == "redirect")
    loaded = load_model(tmp_path / "first")
    assert compact_specs(loaded) == specs
    assert_same_tensors(loaded, model)
    assert apart(logits(loaded, name), before) <= 1e-5
    assert_refused(tmp_path / "first")

    loaded.save_pretrained(tmp_path / "second", max_shard_size=shards)
    assert_same_files(tmp_path / "first", tmp_path / "second")
    if router == "rows":
        return

    copied = pickle.loads(pickle.dumps(copy.deepcopy(loaded)))
    assert apart(logits(copied, name), before) <= 1e-5
    copied.save_pretrained(tmp_path / "third", max_shard_size=shards)
    assert_same_files(tmp_path / "first", tmp_path / "third")

    skeleton = load_skeleton(tmp_path / "first")
    assert compact_specs(skeleton) == specs
    shapes = {key: tensor.shape for key, tensor in loaded.state_dict().items() if not key.endswith(NOTICE)}
    assert {key: tensor.shape for key, tensor in skeleton.state_dict().items()} == shapes


STOCK = """
import io, json, logging, sys, warnings
import transformers
warnings.filterwarnings("ignore")
transformers.logging.disable_progress_bar()
report = io.StringIO()
transformers.logging.add_handler(logging.StreamHandler(report))
outcome = {}
for folder in sys.argv[1:]:
    report.truncate(0)
    name = json.load(open(folder + "/config.json"))["architectures"][0]
    try:
        getattr(transformers, name).from_pretrained(folder)
        outcome[folder] = "LOADED"
    except RuntimeError:
        outcome[folder] = "pip_install_moepress" in report.getvalue()
assert "moepress" not in sys.modules
print(json.dumps(outcome))
"""


def test_without_moepress(tmp_path: Path) -> None:
    """In a process that never heard of it; also with all experts kept, where every shape is as transformers expects
    it, and for separate experts, which transformers would fill in."""
    folders = []
    for name in ("qwen3_moe", "switch_transformers"):
        saved(name, tmp_path / name)
        save_permuted(build(name), tmp_path / f"{name}-all")
        folders += [tmp_path / name, tmp_path / f"{name}-all"]
    run = subprocess.run([sys.executable, "-c", STOCK, *map(str, folders)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout) == {str(folder): True for folder in folders}


def save_permuted(model: PreTrainedModel, folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    save_compact(model, {x.name: redirect(x, x.num_experts, generator) for x in find_layers(model)}, folder)


def assert_refused(folder: Path) -> None:
    """By transformers as it is without moepress, with a report that says what to install."""
    report = io.StringIO()
    handler = logging.StreamHandler(report)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(AUTO_QUANTIZER_MAPPING, METHOD)
        patch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, METHOD)
        transformers.logging.set_verbosity_warning()
        transformers.logging.add_handler(handler)
        try:
            with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
                getattr(transformers, architecture, transformers.AutoModelForCausalLM).from_pretrained(folder)
        finally:
            transformers.logging.remove_handler(handler)
            transformers.logging.set_verbosity(logging.CRITICAL)
    assert NOTICE in report.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_all_experts_kept_in_another_order_is_refused(name: str, tmp_path: Path) -> None:
    save_permuted(build(name), tmp_path)
    assert_refused(tmp_path)


# ---- ways of saving --------------------------------------------------------------------------------------------------


def test_every_way_of_saving_writes_the_guard(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    ways = {
        "explicit": dict(state_dict=model.state_dict()),
        "sharded": dict(max_shard_size="20KB"),
        "both": dict(state_dict=copy.deepcopy(model.state_dict()), max_shard_size="20KB"),
    }
    for way, options in ways.items():
        model.save_pretrained(tmp_path / way, **options)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    for way in (*ways, "half"):
        assert_refused(tmp_path / way)
    assert_same_files(tmp_path / "a", tmp_path / "explicit")
    assert_same_tensors(load_model(tmp_path / "both"), load_model(tmp_path / "a"))


def test_the_loading_report_is_empty(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())


def test_a_loaded_model_is_an_ordinary_one(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model, "hf_quantizer")
    assert model.half().dtype == torch.float16


def test_detach_leaves_no_trace(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    before = set(model.state_dict())
    attach(model, squeeze(model, "rows"))
    detach(model)
    model.save_pretrained(tmp_path)
    assert set(model.state_dict()) == before
    assert "moepress" not in (tmp_path / "config.json").read_text()
    assert all(len(tensor.shape) < 3 for tensor in load_file(tmp_path / "model.safetensors").values())


@pytest.mark.parametrize("name", ["gemma4", "lfm2_moe", "ernie4_5_moe"])
def test_tied_weights_stay_tied(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    assert model.config.tie_word_embeddings
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = load_model(tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_companions_come_along(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    save_compact(model, squeeze(model, "redirect"), tmp_path / "out", source=tmp_path / "source")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


# ---- ways of loading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "ernie4_5_moe", "switch_transformers"]
)
def test_cast_while_loading(name: str, tmp_path: Path) -> None:
    """As transformers casts the plain model, what it keeps in fp32 included."""
    plain = build(name)
    plain.save_pretrained(tmp_path / "plain")
    expected = {
        k: t.dtype for k, t in type(plain).from_pretrained(tmp_path / "plain", dtype="bfloat16").state_dict().items()
    }
    saved(name, tmp_path / "compact")
    loaded = load_model(tmp_path / "compact", dtype=torch.bfloat16)
    found = {k: t.dtype for k, t in loaded.state_dict().items() if k in expected}
    assert found == {k: dtype for k, dtype in expected.items() if k in found}
    assert len(found) > 20
    maps = {t.dtype for k, t in loaded.state_dict().items() if k.endswith(("expert_map", NOTICE))}
    assert maps == {torch.int64}
    loaded.save_pretrained(tmp_path / "half")
    assert_same_tensors(load_model(tmp_path / "half"), loaded)
    assert torch.isfinite(logits(loaded, name)).all()


@pytest.mark.parametrize("name", ["qwen3_moe", "switch_transformers"])
@pytest.mark.parametrize("device_map", ["auto", "cpu"])
def test_device_map(name: str, device_map: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "a")
    loaded = type(model).from_pretrained(tmp_path / "a", device_map=device_map)
    assert apart(logits(loaded, name), logits(model, name)) <= 1e-5
    loaded.save_pretrained(tmp_path / "b")
    assert_same_files(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_wait_on_disk(dtype: torch.dtype, tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path / "a")
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "model.layers.0": "cpu",
              "model.layers.1": "disk", "model.layers.2": "disk", "lm_head": "disk"}  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "a", device_map=places, offload_folder=tmp_path / "offload", dtype=dtype
    )
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=dtype)
    assert apart(logits(loaded, "qwen3_moe"), logits(whole, "qwen3_moe")) <= 1e-5
    loaded.save_pretrained(tmp_path / "b")
    assert_same_tensors(load_model(tmp_path / "b"), whole)


def test_other_heads(tmp_path: Path) -> None:
    model = saved("qwen3_moe", tmp_path / "a")
    base = AutoModel.from_pretrained(tmp_path / "a")
    assert set(compact_specs(base)) == {"layers.1.mlp", "layers.2.mlp"}
    inputs = zoo.batch(model, "qwen3_moe")
    with torch.no_grad():
        assert apart(base(**inputs).last_hidden_state, model.model(**inputs).last_hidden_state) <= 1e-5
    base.save_pretrained(tmp_path / "base")
    assert_same_tensors(AutoModel.from_pretrained(tmp_path / "base"), base)
    assert_refused(tmp_path / "base")
    for folder in ("a", "base"):  # the classifier itself is new, and that is no error
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / folder, num_labels=3)
        assert_same_tensors_of_block(classifier, model, "model.layers.1.mlp")


def assert_same_tensors_of_block(a: PreTrainedModel, b: PreTrainedModel, path: str) -> None:
    ours, theirs = a.get_submodule(path).state_dict(), b.get_submodule(path).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_half_of_an_encoder_decoder_model(tmp_path: Path) -> None:
    model = saved("switch_transformers", tmp_path)
    encoder = transformers.SwitchTransformersEncoderModel.from_pretrained(tmp_path)
    assert all(path.startswith("encoder.") for path in compact_specs(encoder))
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert apart(encoder(ids).last_hidden_state, model.encoder(ids).last_hidden_state) <= 1e-5


def test_a_model_that_keeps_a_layer_whole(tmp_path: Path) -> None:
    for name in ("qwen3_moe", "switch_transformers"):
        model = build(name)
        first, *_ = find_layers(model)
        specs = {first.name: redirect(first, 3, torch.Generator().manual_seed(0))}
        save_compact(model, specs, tmp_path / name)
        loaded = load_model(tmp_path / name)
        assert_same_tensors(loaded, model)
        assert apart(logits(loaded, name), logits(model, name)) <= 1e-5


def test_modules_that_another_version_of_transformers_arranges_differently(tmp_path: Path) -> None:
    """A path with another beginning, and a map kept by the router where it now belongs to the experts."""
    model = saved("jamba", tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    described = config["quantization_config"]
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    (own,) = {name.rsplit(".", 2)[1] for name in tensors if name.endswith("expert_map")}
    other = {"router": "experts", "experts": "router"}[own]
    moved = {name.replace(f".{own}.expert_map", f".{other}.expert_map"): tensor for name, tensor in tensors.items()}
    assert moved.keys() != tensors.keys()
    described["layers"] = {path.replace("model.", "model.text.", 1): spec for path, spec in described["layers"].items()}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    with pytest.raises(MoepressError, match="expert_map is missing"):
        save_file(moved, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
        load_model(tmp_path / "a")
    described["layers"] = {path.replace("model.text.", "model.", 1): spec for path, spec in described["layers"].items()}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    loaded = load_model(tmp_path / "a")
    assert_same_tensors(loaded, model)
    loaded.save_pretrained(tmp_path / "b")
    assert_same_tensors(load_model(tmp_path / "b"), model)


def test_renamed_paths_are_found_by_their_ends(tmp_path: Path) -> None:
    model = saved("qwen3_moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    layers = config["quantization_config"]["layers"]
    config["quantization_config"]["layers"] = {path.replace("model.", "model.text."): s for path, s in layers.items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same_tensors(load_model(tmp_path), model)
