"""`moepress bench memory`: how much memory and time it takes to compress a random checkpoint that is written for it.

Memory is the peak of resident memory of a process of its own (VmHWM). The floor that time is compared with is reading
the checkpoint once, plus the forward passes of the calibration text alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from moepress.bench.results import Table, write
from moepress.bench.timing import human_seconds, machine, machine_words
from moepress.checkpoint.files import TensorFiles, bytes_of
from moepress.checkpoint.folder import INDEX, check_checkpoint
from moepress.checkpoint.headers import NAMES
from moepress.checkpoint.load import load_model, quiet
from moepress.checkpoint.shards import Item, divided, write_file
from moepress.checkpoint.sizes import human_size
from moepress.errors import MoepressError
from moepress.fit import parse_size

TARGET = (0.25, 0.6)
"""Peak memory: this share of the checkpoint, and so many GB."""
POOL = 1 << 24
"""Random numbers that all weights are cut from."""


@dataclass(frozen=True)
class Settings:
    shapes: tuple[str, ...] = ("switch", "qwen3-moe")
    size: str = "4GB"
    method: str = "m-smoe"
    keep: float = 0.5
    samples: int = 32
    length: int = 128
    align: bool = False
    folder: str | None = None
    """Where the checkpoint is written for a while."""
    seed: int = 0

    def command(self) -> str:
        words = ["moepress bench memory"] + [f"--shape {shape}" for shape in self.shapes]
        plain = Settings()
        for name in ("size", "method", "keep", "samples", "length"):
            if getattr(self, name) != getattr(plain, name):
                words.append(f"--{name} {getattr(self, name)}")
        return " ".join([*words, *(["--align"] if self.align else [])])


def config_of(shape: str, size: int) -> Any:
    """A config of about so many bytes in bfloat16."""
    from transformers import Qwen3MoeConfig, SwitchTransformersConfig

    if shape == "switch":  # switch-base-32 at 4 GB
        layers = max(2, 2 * round((size - 0.35e9) / 0.302e9 / 2))
        return SwitchTransformersConfig(  # type: ignore[call-arg]
            d_model=768, d_kv=64, d_ff=3072, num_heads=12, num_experts=32, vocab_size=32128, num_layers=layers,
            num_decoder_layers=layers, num_sparse_encoder_layers=layers // 2, num_sparse_decoder_layers=layers // 2,
            decoder_start_token_id=0, dtype="bfloat16", expert_capacity=64,
        )  # fmt: skip
    if shape == "qwen3-moe":
        return Qwen3MoeConfig(  # type: ignore[call-arg]
            hidden_size=1024, moe_intermediate_size=384, num_experts=128, num_experts_per_tok=8, vocab_size=32000,
            num_hidden_layers=max(1, round((size - 0.13e9) / 0.311e9)), num_attention_heads=16, num_key_value_heads=4,
            head_dim=64, intermediate_size=2048, dtype="bfloat16",
        )  # fmt: skip
    raise MoepressError(f"there is no shape {shape!r}: switch or qwen3-moe")


def write_random(shape: str, size: int, folder: Path, seed: int) -> int:
    """A checkpoint with random weights as its family stores it; its bytes."""
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    config = config_of(shape, size)
    name = "SwitchTransformersForConditionalGeneration" if shape == "switch" else "Qwen3MoeForCausalLM"
    with quiet(), torch.device("meta"):
        model = getattr(transformers, name)._from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(POOL, generator=generator).mul_(0.02).bfloat16()
    tied = model.all_tied_weights_keys
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    offset = 0

    def item(name: str, tensor: torch.Tensor) -> Item:
        nonlocal offset
        offset = (offset + 7919 * 64) % (POOL // 2)
        start = offset

        def chunks() -> Iterator[memoryview]:
            left = tensor.numel()
            if tensor.dim() == 1:
                yield bytes_of(torch.ones(left, dtype=torch.bfloat16))
                return
            while left:
                piece = pool[start : start + min(left, POOL // 2)]
                yield bytes_of(piece)
                left -= piece.numel()

        return Item(name, NAMES[torch.bfloat16], tuple(tensor.shape), 2 * tensor.numel(), chunks)

    items = [item(name, tensor) for name, tensor in revert_weight_conversion(model, state).items()]
    groups = list(divided(items, 10**9))
    places: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_file(folder / file, group)
        places |= {item.name: file for item in group}
    total = sum(item.size for item in items)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    config.architectures = [name]
    config.save_pretrained(folder)
    return total


CHILD = """
import json, sys, time
asked = json.loads(sys.argv[1])
import torch
torch.set_num_threads(1)
import moepress
start, cpu = time.perf_counter(), time.process_time()
result = moepress.compress(asked["model"], asked["out"], **asked["options"])
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
status = open("/proc/self/status").read()
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
found = {"peak": peak, "seconds": seconds, "cpu": cpu, "stages": result.outcome.seconds, "after": result.after.bytes}
print(json.dumps(found))
"""


def run(settings: Settings, out: Path) -> tuple[dict[str, Any], list[Table]]:
    if not Path("/proc/self/status").exists():
        raise MoepressError("bench memory reads /proc, which this system does not have")
    described = machine(torch.device("cpu"))
    data: dict[str, Any] = {
        "benchmark": "memory",
        "command": settings.command(),
        "settings": asdict(settings) | {"folder": None},
        "machine": described | {"words": machine_words(described)},
        "rows": {},
    }
    for shape in settings.shapes:
        place = nullcontext(settings.folder) if settings.folder else tempfile.TemporaryDirectory()
        with place as name, tempfile.TemporaryDirectory(dir=name) as folder:
            data["rows"][shape] = measure(shape, settings, Path(folder))
    tables = [table_of(data["rows"])]
    write(out, "memory", data, "Memory and time of compressing a random checkpoint", tables, drawing(data))
    return data, tables


def measure(shape: str, settings: Settings, folder: Path) -> dict[str, Any]:
    from safetensors.torch import save_file

    model = folder / "model"
    model.mkdir()
    size = write_random(shape, parse_size(settings.size), model, settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    save_file(
        {"text": torch.randint(5, 32000, (settings.samples, settings.length), generator=generator)},
        folder / "text.safetensors",
    )
    options: dict[str, Any] = {
        "method": settings.method,
        "keep": settings.keep,
        "calibration": str(folder / "text.safetensors"),
    }
    if not settings.align and settings.method == "m-smoe":
        options["align.method"] = "none"
    asked = {"model": str(model), "out": str(folder / "out"), "options": options}
    made = subprocess.run([sys.executable, "-c", CHILD, json.dumps(asked)], capture_output=True, text=True)
    if made.returncode:
        raise MoepressError(f"the compression failed: {made.stderr.strip().splitlines()[-1]}")
    found = json.loads(made.stdout.strip().splitlines()[-1])
    read = reading(model)
    forward = calibrating(model, folder / "text.safetensors")
    share, base = TARGET
    return found | {
        "bytes": size,
        "read": read,
        "forward": forward,
        "allowed": share * size + base * 1e9,
        "ratio": found["cpu"] / (read + forward),
    }


def reading(model: Path) -> float:
    """CPU seconds to read the whole checkpoint into one buffer."""
    files = TensorFiles(check_checkpoint(model))
    start = time.process_time()
    for name in files.header:
        files.borrow(name)
    seconds = time.process_time() - start
    files.close()
    return seconds


def calibrating(model: Path, text: Path) -> float:
    """CPU seconds of the forward passes of the calibration text, up to the last MoE layer, without reading weights."""
    from moepress.checkpoint.paging import PagedWeights
    from moepress.data.batches import CalibrationData, calibration_batches
    from moepress.models.find import find_layers
    from moepress.models.walk import walk
    from moepress.models.weights import Weights

    paged = load_model(model, paged=True)
    weights = Weights.of(paged)
    assert isinstance(weights, PagedWeights)
    batches = calibration_batches(CalibrationData(source=str(text)), None, paged.config)
    spent = 0.0
    load = weights.load

    def timed(*args: Any) -> None:
        nonlocal spent
        start = time.process_time()
        load(*args)
        spent += time.process_time() - start

    weights.load = timed  # type: ignore[method-assign, assignment]
    start = time.process_time()
    with weights.widened(torch.float32):
        for _ in walk(paged, batches, layers=find_layers(paged)):
            pass
    return time.process_time() - start - spent


def table_of(rows: dict[str, Any]) -> Table:
    columns = ["checkpoint", "size", "peak memory", "allowed", "CPU seconds", "reading + calibration", "ratio"]
    lines = [
        [
            shape,
            human_size(row["bytes"]),
            human_size(row["peak"]),
            human_size(row["allowed"]),
            human_seconds(row["cpu"]),
            f"{human_seconds(row['read'])} + {human_seconds(row['forward'])}",
            f"{row['ratio']:.2f}",
        ]
        for shape, row in rows.items()
    ]
    note = (
        "Allowed: a quarter of the checkpoint and 0.6 GB. CPU seconds of one thread, those of the system included. "
        "Ratio: all of it against reading once and calibrating."
    )
    return Table("A process of its own", columns, lines, note)


def drawing(data: dict[str, Any]) -> Any:
    def draw(file: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(6, 3))
        shapes = list(data["rows"])
        for i, (key, label) in enumerate((("bytes", "checkpoint"), ("allowed", "allowed"), ("peak", "peak"))):
            heights = [data["rows"][shape][key] / 1e9 for shape in shapes]
            axes.bar([x + 0.27 * i for x in range(len(shapes))], heights, 0.25, label=label)
        axes.set_xticks([x + 0.27 for x in range(len(shapes))], shapes)
        axes.set_ylabel("GB")
        axes.legend(frameon=False)
        figure.tight_layout()
        figure.savefig(file, dpi=120)
        pyplot.close(figure)

    return draw
