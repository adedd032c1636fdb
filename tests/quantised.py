"""Tiny quantised checkpoints, made of the models of `zoo`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from moepress.checkpoint.quantised import Storage, storage_of
from moepress.plan import Plan

from . import zoo
from .squeeze import build

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic", "fmt": "e4m3"},
    "ragged": {"quant_method": "fp8", "weight_block_size": [16, 16]},
    "powers": {"quant_method": "fp8", "weight_block_size": [8, 8], "scale_fmt": "ue8m0"},
    "tied": {"quant_method": "fp8", "weight_block_size": [8, 8]},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": INT4, "input_activations": None, "targets": ["Linear"]}},
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp\\.(gate|up|down)_proj$", "re:.*mlp\\.gate$"],
    },
}
FAMILY = {
    "fp8": "qwen3_moe",
    "tied": "lfm2_moe",
    "ragged": "deepseek_v3",
    "powers": "mixtral",
    "mxfp4": "gpt_oss",
    "int4": "qwen3_moe",
}
EVERYWHERE = re.compile(r"\.(mlp|self_attn|block_sparse_moe|feed_forward)\..*(_proj|\.w[123])\.weight$")
EXPERTS_ONLY = re.compile(r"\.experts\.(.*_proj\.weight|(gate_up|down)_proj)$")
TYPES = {"fp8": {"scales": torch.float32}, "compressed-tensors": {"scales": torch.bfloat16, "shape": torch.int64}}
"""Of what lies beside the numbers."""


def plain(kind: str, folder: Path) -> Path:
    """The model before it is quantised."""
    if kind == "mxfp4":  # in groups of 32
        config = zoo.FAMILIES["gpt_oss"].config()
        config.intermediate_size = 64
        model = AutoModelForCausalLM.from_config(config)
        zoo._redraw(model, torch.Generator().manual_seed(0))
    else:
        model = build(FAMILY[kind])
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def quantise(kind: str, source: Path, folder: Path) -> Path:
    """Quantise the linear maps (int4 and MXFP4: the experts only, as published models are)."""
    storage = storage_of(CONFIGS[kind], source)
    types = TYPES.get(CONFIGS[kind]["quant_method"], {})
    chosen = EVERYWHERE if CONFIGS[kind]["quant_method"] == "fp8" else EXPERTS_ONLY
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors |= packed(storage, types, name, tensor) if chosen.search(name) else {name: tensor}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": CONFIGS[kind]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def packed(storage: Storage, types: dict[str, torch.dtype], name: str, tensor: Tensor) -> dict[str, Tensor]:
    rows = [storage.pack(row, types) for row in (tensor if tensor.dim() > 2 else tensor[None])]
    stacked = {role: torch.stack([row[role] for row in rows]) for role in rows[0]}
    return {stored: stacked[r] if tensor.dim() > 2 else rows[0][r] for r, stored in storage.names(name).items()}


def unpacked(storage: Storage, stored: dict[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    out = torch.full(shape, torch.nan)
    for place, values in storage.unpack(stored):
        out[place] = values
    return out


def assert_bytes_are_kept(before: dict[str, Any], after: dict[str, Any], plan: Plan) -> None:
    """All tensors of the output are those of the input, of the experts that were kept."""
    number = re.compile(r"layers\.\d+\.")  # the same in the model and in the files, where blocks have other names
    leaders = {number.search(layer.name)[0]: [group.leader for group in layer.groups] for layer in plan.layers}  # type: ignore[index]
    for name, tensor in after.items():
        layer = number.search(name)
        chosen = leaders.get(layer[0], []) if layer else []
        name = re.sub(r"(?<=\.experts\.)\d+", lambda found, chosen=chosen: str(chosen[int(found[0])]), name)
        original = before[name]
        if original.shape != tensor.shape:
            original = original[chosen]
        assert original.dtype == tensor.dtype, name
        assert torch.equal(original.view(torch.uint8), tensor.view(torch.uint8)), name
