"""The config.json of an output has the words of the original's, as published, and means the same to transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import moepress
from moepress.checkpoint.counts import expert_counts
from moepress.checkpoint.wording import keep_wording
from tests import zoo
from tests.clients.models import ASSETS, DEMO
from tests.squeeze import silent  # noqa: F401

FEW: dict[str, Any] = {"calibration.samples": 2, "calibration.length": 32}
TEXT = str(ASSETS / "demo-text.jsonl")
LITTLE: dict[str, Any] = {
    "method": "frequency-pruning",
    "keep": 8,
    "calibration": TEXT,
} | FEW

PUBLISHED: dict[str, Any] = {  # how the demonstration's model would have been published with transformers 4
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "decoder_sparse_step": 1, "eos_token_id": 1, "head_dim": 64, "hidden_act": "silu", "hidden_size": 128,
    "initializer_range": 0.02, "intermediate_size": 512, "max_position_embeddings": 1024, "mlp_only_layers": [],
    "model_type": "qwen3_moe", "moe_intermediate_size": 128, "norm_topk_prob": True, "num_attention_heads": 2,
    "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_key_value_heads": 1, "pad_token_id": 0,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 20000.0, "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "vocab_size": 8192, "a_word_of_their_own": {"x": [1]},
}  # fmt: skip


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("moepress.api", "moepress.records"):
        monkeypatch.setattr(f"{place}.draw_report", lambda records: records / "report.html")


@pytest.fixture
def published(tmp_path: Path) -> Path:
    shutil.copytree(DEMO, tmp_path / "published")
    (tmp_path / "published" / "config.json").write_text(json.dumps(PUBLISHED))
    return tmp_path / "published"


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_a_vanilla_output_says_what_the_original_said(published: Path, tmp_path: Path) -> None:
    moepress.compress(published, tmp_path / "out", format="vanilla", **LITTLE)
    assert config_of(tmp_path / "out") == PUBLISHED | {"num_experts": 8}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.num_local_experts == 8 and model.config.rope_parameters["rope_theta"] == 20000.0
    assert model.dtype == torch.bfloat16


def test_so_does_an_export_of_a_compact_output(published: Path, tmp_path: Path) -> None:
    moepress.compress(published, tmp_path / "out", **LITTLE)
    compact = config_of(tmp_path / "out")
    assert compact.pop("quantization_config")["quant_method"] == "moepress" and compact == PUBLISHED
    moepress.export(tmp_path / "out", tmp_path / "vanilla")
    assert config_of(tmp_path / "vanilla") == PUBLISHED | {"num_experts": 8}


def test_so_does_what_was_trained(published: Path, tmp_path: Path) -> None:
    moepress.compress(published, tmp_path / "out", format="vanilla", **LITTLE)
    little: dict[str, Any] = {"samples": 2, "length": 32, "steps": 1, "batch_size": 2, "hold_out": 0}
    moepress.recover(tmp_path / "out", tmp_path / "better", teacher=published, data=TEXT, **little)
    assert config_of(tmp_path / "better").keys() == PUBLISHED.keys()
    assert config_of(tmp_path / "better")["num_experts"] == 8


def test_a_model_in_another_type_says_its_own(published: Path, tmp_path: Path) -> None:
    from moepress.checkpoint.load import load_model
    from moepress.checkpoint.vanilla import save_vanilla

    save_vanilla(load_model(published, dtype="float32"), {}, tmp_path, source=published)
    assert config_of(tmp_path) == PUBLISHED | {"torch_dtype": "float32"}


def test_what_would_mean_something_else_is_left(published: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    config = AutoConfig.from_pretrained(published)
    config.rope_parameters["rope_theta"] = 5.0
    config.save_pretrained(tmp_path / "out")
    before = config_of(tmp_path / "out")
    assert not keep_wording(published, tmp_path / "out", type(config))
    assert config_of(tmp_path / "out") == before
    (published / "config.json").write_text(json.dumps(PUBLISHED | {"hidden_size": "wide"}))
    assert not keep_wording(published, tmp_path / "out", type(config))


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_every_family(name: str, tmp_path: Path) -> None:
    """Fewer experts, and nothing else, wherever the family keeps the number."""
    from moepress.checkpoint.counts import set_expert_count

    config = zoo.FAMILIES[name].config()
    config.save_pretrained(tmp_path / "original")
    set_expert_count(config, zoo.NUM_EXPERTS, 4)
    config.save_pretrained(tmp_path / "out")
    expected = type(config).from_pretrained(tmp_path / "out").to_dict()
    assert keep_wording(tmp_path / "original", tmp_path / "out", type(config))
    found = type(config).from_pretrained(tmp_path / "out")
    assert found.to_dict() == expected and set(expert_counts(found).values()) == {4}
    assert config_of(tmp_path / "out").keys() == config_of(tmp_path / "original").keys()
