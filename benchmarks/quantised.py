"""Pruning and refitting a quantised checkpoint, beside its unpacked twin: KL to the bf16 model that both come from.

    python benchmarks/quantised.py

Quantises the demonstration's model in each format, halves its experts and writes benchmarks/results/cpu/quantised.json.
The calibration text and the text that is evaluated on are the demonstration's.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import moepress
from moepress.checkpoint.load import load_model, quiet
from moepress.checkpoint.quantised import storage_of
from moepress.checkpoint.sizes import disk_bytes

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "src" / "moepress" / "assets"
RESULTS = Path(__file__).parent / "results" / "cpu"
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"weights": INT4, "targets": ["Linear"]}},
        "ignore": ["lm_head", "re:.*self_attn.*"],
    },
}
TYPES = {"fp8": {"scales": torch.float32}, "int4": {"scales": torch.bfloat16, "shape": torch.int64}}
METHODS = ("reap-all", "prune-refit")
KEEP = 0.5
SAMPLES, LENGTH = 64, 256


def quantise(source: Path, kind: str, folder: Path) -> None:
    """The experts and, in fp8, the other linear maps."""
    storage = storage_of(FORMATS[kind], source)
    shutil.copytree(source, folder)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".experts." in name or (kind == "fp8" and name.endswith("_proj.weight")):
            packed, names = storage.pack(tensor, TYPES[kind]), storage.names(name)
            tensors |= {names[role]: part for role, part in packed.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": FORMATS[kind]}
    (folder / "config.json").write_text(json.dumps(config))


def kl(model: Path, original: Path) -> float:
    text = str(ASSETS / "demo-eval.jsonl")
    return moepress.evaluate(model, against=original, text=text, length=LENGTH)["kl"]


def main() -> None:
    source = ASSETS / "demo-moe"
    rows = []
    options = {"calibration": str(ASSETS / "demo-text.jsonl"), "format": "vanilla", "keep": KEEP}
    options |= {"calibration.samples": SAMPLES, "calibration.length": LENGTH}
    with tempfile.TemporaryDirectory() as name, quiet():
        for kind in FORMATS:
            model, twin = Path(name, kind), Path(name, f"{kind}-unpacked")
            quantise(source, kind, model)
            load_model(model).save_pretrained(twin)
            for file in source.glob("token*"):
                shutil.copy(file, twin)
            row = {
                "format": kind,
                "kl": kl(model, source),
                "bytes": disk_bytes(model),
                "bytes_bf16": disk_bytes(source),
            }
            for method in METHODS:
                for form, place in (("quantised", model), ("unpacked", twin)):
                    out = Path(name, "out")
                    moepress.compress(place, out, method=method, overwrite=True, **options)
                    row[f"{method}, {form}"] = {"kl": kl(out, source), "bytes": disk_bytes(out)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    content = {"command": "python benchmarks/quantised.py", "moepress": moepress.__version__, "rows": rows}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "quantised.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
