"""Compact checkpoints that are damaged or misused: each is one clear error, never a model with wrong weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moepress.checkpoint.compact import attach, compact_specs
from moepress.checkpoint.quantizer import MoepressConfig
from moepress.errors import MoepressError
from moepress.models.layer import CompactSpec
from tests.squeeze import build, saved, silent, squeeze  # noqa: F401


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        name = next(key for key in tensors if key.endswith(name.replace("__", ".")))
        tensors.pop(name)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers__1__mlp__gate__expert_map": None}, "layers.1.mlp.gate.expert_map is missing"),
        ({"layers__2__mlp__gate__weight": None}, "layers.2.mlp.gate.weight is missing"),
        ({"layers__2__self_attn__q_proj__weight": None}, "layers.2.self_attn.q_proj.weight is missing"),
        ({"layers__2__mlp__experts__1__up_proj__weight": None, "layers__2__mlp__experts__1__gate_proj__weight": None},
         r"layers.2.mlp.experts.gate_up_proj has shape \(4, 48, 32\) and should have \(5, 48, 32\)"),
        ({"layers__1__mlp__gate__expert_map": torch.full((8,), 3)}, "points outside of its 3 experts"),
        ({"layers__1__mlp__gate__expert_map": torch.zeros(7, dtype=torch.int64)}, r"expert_map has shape \(7,\)"),
        ({"layers__2__mlp__gate__weight": torch.zeros(8, 16)}, r"gate.weight has shape \(8, 16\)"),
        ({"layers__1__mlp__gate__weight": torch.zeros(4, 32, 1)}, r"gate.weight has shape \(4, 32\)"),
    ],
)  # fmt: skip
def test_damaged_tensors(changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    edit_tensors(tmp_path, **changes)
    with pytest.raises(MoepressError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_missing_expert_of_a_module_dict(tmp_path: Path) -> None:
    saved("switch_transformers", tmp_path)
    edit_tensors(tmp_path, decoder__block__1__layer__2__mlp__experts__expert_1__wo__weight=None)
    with pytest.raises(MoepressError, match="expert_1.wo.weight is missing"):
        transformers.SwitchTransformersForConditionalGeneration.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format_version"], 2, "has format 2 and this moepress reads format 1"),
        (["layers", "model.layers.1.mlp", "rank"], 4, "unknown to moepress"),
        (["layers", "model.layers.1.mlp", "experts"], 16, "8 experts in one place and 16 in another"),
        (["layers", "model.layers.1.mlp", "physical"], 9, "cannot keep 9"),
        (["layers", "model.layers.7.mlp"], {"experts": 8, "physical": 3}, "which Qwen3MoeForCausalLM does not have"),
        (["layers"], {"other.place": {"experts": 8, "physical": 3}}, "does not have"),
    ],
)  # fmt: skip
def test_damaged_descriptions(path: list[str], value: object, message: str, tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    place = config["quantization_config"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MoepressError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_attach_checks_the_specs() -> None:
    model = build("qwen3_moe")
    specs = squeeze(model, "redirect")
    first = next(iter(specs))
    for wrong, message in [
        ({}, "nothing was compressed"),
        ({"model.layers.9.mlp": specs[first]}, "has no layer"),
        ({"model.layers.1": specs[first]}, "no MoE layer"),
        ({first: CompactSpec(16, 3)}, "routes to 8 experts"),
        ({first: CompactSpec(8, 3, "rows")}, "its spec says 3"),
        ({first: CompactSpec(8, 0)}, "cannot keep 0"),
        ({first: CompactSpec(8, 4)}, "holds 3 experts, but its spec says 4"),
    ]:
        with pytest.raises(MoepressError, match=message):
            attach(model, wrong)
    assert compact_specs(model) == {}


def test_quantisers_do_not_stack(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    with pytest.raises(ValueError, match="MoepressConfig"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=transformers.QuantoConfig(weights="int8"))
    build("qwen3_moe").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="pre_quantized"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=MoepressConfig())
