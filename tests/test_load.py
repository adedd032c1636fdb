"""Loading in one sentence, and sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from moepress.checkpoint.compact import attach
from moepress.checkpoint.load import load_model, load_skeleton, load_tokenizer, local_folder, model_class
from moepress.checkpoint.sizes import Sizes, disk_bytes, expert_bytes, human_size, predicted_sizes, sizes_of
from moepress.checkpoint.vanilla import save_vanilla
from moepress.errors import MoepressError
from moepress.models.find import find_layers
from moepress.models.layer import CompactSpec
from tests import zoo
from tests.squeeze import assert_same_tensors, build, saved, silent, squeeze  # noqa: F401

# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe", "switch_transformers", "glm4v_moe", "openai_privacy_filter", "mistral4"])
def test_each_in_its_own_class(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert type(loaded) is type(model)
    assert_same_tensors(loaded, model)
    assert not loaded.training
    skeleton = load_skeleton(tmp_path)
    assert type(skeleton) is type(model)
    assert all(parameter.is_meta for parameter in skeleton.parameters())


def test_device_and_dtype(tmp_path: Path) -> None:
    build("qwen3_moe").to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(tmp_path).dtype == torch.bfloat16
    assert load_model(tmp_path, dtype="float32", device="cpu").dtype == torch.float32


def test_auto_class_where_the_class_is_not_native() -> None:
    def loader(architecture: str | None, **fields: Any) -> str:
        config = transformers.PreTrainedConfig(architectures=[architecture] if architecture else None, **fields)
        return model_class(config).__name__

    assert loader("Qwen3MoeForCausalLM") == "Qwen3MoeForCausalLM"
    assert loader("SomeMoeForCausalLM", auto_map={"AutoModel": "x.y"}) == "AutoModelForCausalLM"
    assert loader("SomeMoeForConditionalGeneration") == "AutoModelForImageTextToText"
    assert loader("SomeMoeForConditionalGeneration", is_encoder_decoder=True) == "AutoModelForSeq2SeqLM"
    assert loader("SomeMoeModel") == "AutoModel"
    assert loader(None) == "AutoModelForCausalLM"


def test_one_sentence_each(tmp_path: Path) -> None:
    def refused(message: str, source: Any = tmp_path) -> None:
        for load in (load_model, load_skeleton):
            with pytest.raises(MoepressError, match=message) as error:
                load(source)
            assert "\n" not in str(error.value)

    refused("does not exist", tmp_path / "nowhere")
    refused("no config.json")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(MoepressError, match="config.json in .* is not understood"):
        load_skeleton(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MoepressError, match="no weights"):
        load_model(tmp_path)


def test_a_missing_tensor_is_never_random(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.gate.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MoepressError, match="is incomplete: model.layers.1.mlp.gate.weight is missing"):
        load_model(tmp_path)


def test_a_wrong_shape_is_one_sentence(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(7)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MoepressError, match="cannot be loaded: RuntimeError"):
        load_model(tmp_path)


def test_quantised_checkpoints_are_refused(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    with pytest.raises(MoepressError, match="is quantised with gptq"):
        load_model(tmp_path)


def test_logs_and_bars_are_silent_and_come_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    logging.enable_progress_bar()
    logging.set_verbosity_info()
    try:
        capfd.readouterr()
        load_model(tmp_path)
        assert capfd.readouterr() == ("", "")
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
        load_model(tmp_path, verbose=True)
        assert "Loading weights" in capfd.readouterr().err
    finally:
        logging.set_verbosity_warning()


# ---- the Hub and tokenizers ------------------------------------------------------------------------------------------


def test_a_hub_name_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("qwen3_moe", tmp_path / "snapshot", "rows")
    (tmp_path / "snapshot" / "tokenizer.json").write_text("{}")
    asked = []

    def download(name: str, revision: str | None, ignore_patterns: list[str], **_: Any) -> str:
        asked.append((name, revision, "*.safetensors" in ignore_patterns))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_model("someone/model", revision="v2").config.num_experts == 8
    load_skeleton("someone/model")
    assert asked == [("someone/model", "v2", False), ("someone/model", None, True)]
    model = build("qwen3_moe")
    save_vanilla(model, squeeze(model, "rows", (4,)), tmp_path / "out", source="someone/model")
    assert (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize("name", ["a/b/c", "./here", "/there", "~/home"])
def test_what_cannot_be_a_hub_name(name: str) -> None:
    with pytest.raises(MoepressError, match="does not exist"):
        local_folder(name)


def test_the_hub_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        MoepressError, match=r"is no folder here, and the Hub cannot be reached \(ConnectionError: no route\)$"
    ):
        local_folder("someone/model")


def test_tokenizer(tmp_path: Path, word_tokenizer: Any) -> None:
    word_tokenizer.save_pretrained(tmp_path / "a")
    assert load_tokenizer(tmp_path / "a")("w5 w6").input_ids == [5, 6]
    (tmp_path / "b").mkdir()
    with pytest.raises(MoepressError, match="has no tokenizer") as error:
        load_tokenizer(tmp_path / "b")
    assert "\n" not in str(error.value)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_sizes_add_up(tmp_path: Path) -> None:
    model = build("lfm2_moe")  # its embeddings are tied
    sizes = sizes_of(model)
    assert sizes.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sizes.expert_parameters == sum(layer.expert_parameters for layer in find_layers(model))
    assert sizes.expert_bytes == sum(8 * expert_bytes(layer) for layer in find_layers(model))
    model.save_pretrained(tmp_path)
    assert 0 <= disk_bytes(tmp_path) - sizes.bytes < 20_000  # headers
    assert sizes.to_dict() | {"bytes": 1} == {
        "parameters": sizes.parameters, "bytes": 1, "expert_parameters": sizes.expert_parameters,
        "expert_bytes": sizes.expert_bytes, "other_parameters": sizes.other_parameters,
        "other_bytes": sizes.other_bytes,
    }  # fmt: skip
    assert sizes_of(load_skeleton(tmp_path)) == sizes
    attach(model, squeeze(model, "redirect"))
    assert sizes_of(model).expert_bytes < sizes.expert_bytes


def test_sizes_of_what_is_not_supported() -> None:
    dense = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9
        )
    )
    assert sizes_of(dense) == Sizes(0, 0, dense.num_parameters(), 4 * dense.num_parameters())
    shared = zoo.build("diffusion_gemma")  # encoder and decoder share their experts
    sizes = sizes_of(shared)
    assert 0 < sizes.expert_parameters < sizes.parameters == shared.num_parameters()
    with pytest.raises(MoepressError, match="has no MoE layer 'x'"):
        predicted_sizes(build("qwen3_moe"), {"x": CompactSpec(8, 4)})


def test_human_sizes() -> None:
    assert [human_size(size) for size in (0, 999, 1234, 5_400_000, 12_345_678_901, 2e15)] == [
        "0 B", "999 B", "1.23 kB", "5.4 MB", "12.3 GB", "2e+03 TB",
    ]  # fmt: skip
    assert replace(Sizes(1, 4, 2, 8), other_bytes=1996).human() == "2 kB"
