"""What compressing a 235 B and a 1 T model takes, by arithmetic: memory, disk, operations, reading, network.

    python benchmarks/large_models.py -o benchmarks/results/cpu/large_models.json

Shapes come from the models' configs, in checkpoints whose files are as large as the real ones and hold nothing (sparse
files: they take no room). Memory is what `--memory` counts (`moepress.budget`). The rates by which operations and bytes
become hours are measured here, on one core, one disk and the loopback network.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from moepress.budget import need
from moepress.checkpoint.load import load_model, quiet
from moepress.checkpoint.sizes import predicted_sizes, sizes_of
from moepress.data import window_batches
from moepress.models.find import find_layers
from moepress.models.layer import CompactSpec, MoELayer
from moepress.observe.statistic import LayerShape
from moepress.pipeline import press
from moepress.recipe import make_recipe

SAMPLES, LENGTH, KEEP = 256, 512, 0.5
PROCESSES = (1, 8, 32)
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-235B-A22B": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "Kimi-K2": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 163840,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}
METHODS = ("m-smoe", "reap-all", "prune-refit", "auto")


def hollow_checkpoint(folder: Path, settings: dict[str, Any]) -> None:
    """A checkpoint in bfloat16 with the real names and shapes, in one file without contents."""
    config = AutoConfig.for_model(**settings)
    config.architectures = settings["architectures"]
    with torch.device("meta"), quiet():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = revert_weight_conversion(model, model.state_dict())
    header, end = {}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.dtype.itemsize
        dtype = {torch.bfloat16: "BF16", torch.float32: "F32"}[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)


def expert_passes(method: str, shape: LayerShape, chosen: int, tokens: int) -> float:
    """How many times the work of sending all tokens through the experts that they chose; a layer of one method."""
    refit = refit_passes(shape)
    if method in ("m-smoe", "reap-all"):  # one pass; reap-all runs each expert once more, for what it says alone
        return 1.0 if method == "m-smoe" else 3.0  # and goes on through the layer that it changed
    # The model, its unchanged twin, the changed layer; what each expert says alone; a refit on all tokens.
    passes = 4 + refit
    if method == "auto":
        held, candidates = min(16384 / tokens, 0.5), 3
        fitted, sampled = min(32768 / tokens, 1 - held), min(8192, tokens)
        passes += sampled * shape.experts / (tokens * chosen)  # all experts say something to each sampled token
        passes += candidates * (2 * held + refit * fitted)
    return passes


def refit_passes(shape: LayerShape) -> float:
    """Of least squares in turn, with its two rounds: the output once, hidden units (two thirds of an expert) three
    times; for each round and choice of a token PᵀP (2 F²), PᵀR, what an expert says before and after (2 F D each)."""
    products = 2 * (2 * shape.hidden_units**2 + 3 * 2 * shape.hidden_units * shape.width)
    return 1 + 3 * 2 / 3 + products / (6 * shape.hidden_units * shape.width)


def network_bytes(method: str, shape: LayerShape, batches: int, kept: int) -> int:
    """Of one layer's sums, before they are spread: what every process has to send at least once."""
    sums = 8 * batches * 8 * shape.experts  # a handful of numbers for each expert and batch
    if method not in ("prune-refit", "auto"):
        return sums
    solved = 2 * kept * 8 * (shape.hidden_units**2 + shape.hidden_units * shape.width)
    return sums + solved * (4 if method == "auto" else 1)


def readings(method: str) -> int:
    """How often the weights of all layers are read: by a pass, before that three times to find out what the model lets
    one do (refits), or once more to merge what has been observed."""
    return {"m-smoe": 2, "reap-all": 1, "prune-refit": 4, "auto": 4}[method]


def operations(method: str, layers: list[MoELayer], parameters: int, settings: dict[str, Any], tokens: int) -> float:
    """Floating-point operations of a run; those of attention scores are left out, as is the model's head, where no run
    gets to."""
    shape, chosen = LayerShape.of(layers[0]), layers[0].router.top_k
    inside = sum(layer.expert_parameters for layer in layers)
    outside = parameters - inside - 2 * settings["vocab_size"] * settings["hidden_size"]
    expert = 2 * 3 * shape.hidden_units * shape.width * chosen
    streams = 2 if make_recipe({"method": method, "keep": KEEP}).component("refit.method").reference else 1
    inputs = expert_passes(method, shape, chosen, tokens)
    aligned = 3 * 2 * shape.hidden_units**2 * shape.width if method == "m-smoe" else 0  # to find out which units match
    merged_away = shape.experts - round(KEEP * shape.experts)
    return tokens * (streams * 2 * outside + len(layers) * expert * inputs) + len(layers) * merged_away * aligned


def describe(name: str, settings: dict[str, Any], work: Path) -> dict[str, Any]:
    folder = work / name
    folder.mkdir()
    hollow_checkpoint(folder, settings)
    with quiet():
        model = load_model(folder, paged=True)
    layers = find_layers(model)
    shape = LayerShape.of(layers[0])
    weights = layers[0].weights
    text = window_batches(torch.zeros(SAMPLES, LENGTH, dtype=torch.long), model.config, batch_size=8)
    kept = round(KEEP * shape.experts)
    before = sizes_of(model)
    specs = {layer.name: CompactSpec(shape.experts, kept, "rows") for layer in layers}
    after = predicted_sizes(model, specs)
    described: dict[str, Any] = {
        "parameters": before.parameters,
        "bytes": before.bytes,
        "bytes_after": after.bytes,
        "layers": len(layers),
        "layer_bytes": max(weights.bytes_of(weights.targets(layer.name), None) for layer in layers),
        "methods": {},
    }
    for method in METHODS:
        recipe = make_recipe({"method": method, "keep": KEEP})
        memory = {}
        for count in PROCESSES:
            share = text[: -(-len(text) // count)]
            found = need(recipe, layers, weights, share)
            memory[count] = {
                "total": found.total,
                "weights": found.weights,
                "working": found.working + found.alignment,
                "text": found.passing + found.activations,
                "spilled": found.total - found.activations + found.spilled,
            }
        described["methods"][method] = {
            "operations": operations(method, layers, before.parameters, settings, SAMPLES * LENGTH),
            "read": readings(method) * before.bytes,
            "network": len(layers) * network_bytes(method, shape, len(text), kept),
            "memory": memory,
        }
    return described


def rates(work: Path) -> dict[str, Any]:
    """Of this machine. Operations and network are those of one core's time, whatever else the machine does."""
    torch.set_num_threads(1)
    x, w = torch.randn(1024, 4096), torch.randn(1536, 4096)
    for _ in range(2):
        start = time.process_time()
        for _ in range(10):
            torch.nn.functional.linear(x, w)
        core = 10 * 2 * 1024 * 4096 * 1536 / (time.process_time() - start)
    file, size = work / "file", 2**30
    piece = os.urandom(2**24)
    start = time.perf_counter()
    with open(file, "wb") as out:
        for _ in range(size // len(piece)):
            out.write(piece)
        os.fsync(out.fileno())
        written = size / (time.perf_counter() - start)
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    with open(file, "rb", buffering=0) as held:
        while held.read(2**24):
            pass
    read = size / (time.perf_counter() - start)
    return {
        "core": core,
        "write": written,
        "read": read,
        "gloo": gloo_rate(),
        "share": {method: share_of_rate(core, method) for method in ("prune-refit", "auto")},
    }


def share_of_rate(core: float, method: str) -> float:
    """What part of a core's rate a whole run comes to, on one layer of a model with wide enough experts."""
    small = {"hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 384, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 8, "head_dim": 128, "num_experts": 32, "num_experts_per_tok": 4, "vocab_size": 512}
    settings = MODELS["Qwen3-235B-A22B"] | small | heads
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).eval()
    text = window_batches(torch.randint(3, 500, (32, LENGTH)), model.config, batch_size=8)
    refit = {"refit.method": {"name": "least-squares", "joint_units": 1}}  # in turn, as in large models
    recipe = make_recipe({"method": method, "keep": KEEP} | refit)
    layers = find_layers(model)
    done = operations(method, layers, model.num_parameters(), settings, 32 * LENGTH)
    start = time.process_time()
    press(model, recipe, lambda: text)
    return done / (time.process_time() - start) / core


def gloo_rate(numbers: int = 2**23) -> float:
    """Bytes of a sum that two processes on this machine add up in a second."""
    store = tempfile.NamedTemporaryFile().name  # noqa: SIM115 - only a name that nobody has
    child = os.fork()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(child == 0), world_size=2)
    total = torch.zeros(numbers, dtype=torch.float64)
    for _ in range(2):
        start = time.perf_counter()
        for _ in range(3):
            dist.all_reduce(total)
        seconds = (time.perf_counter() - start) / 3
    dist.destroy_process_group()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return 8 * numbers / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = {
            "settings": {"samples": SAMPLES, "length": LENGTH, "keep": KEEP},
            "machine": {"processor": platform.processor() or platform.machine(), "torch": torch.__version__},
            "rates": rates(Path(work)),
            "models": {name: describe(name, settings, Path(work)) for name, settings in MODELS.items()},
        }
    text = json.dumps(found, indent=1)
    if given.out:
        given.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
