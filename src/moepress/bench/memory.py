"""`moepress bench memory`: how much memory and time it takes to compress a random checkpoint that is written for it.

Memory is the peak of resident memory of a process of its own (VmHWM), which includes the program itself. The floor that
time is compared with is reading the checkpoint once, plus the forward passes of the calibration text alone.
"""

from __future__ import annotations

import json
import shutil
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
    methods: tuple[str, ...] = ("auto",)
    budgets: tuple[str, ...] = ()
    """What it may take, one run each; without any, it takes what it takes."""
    keep: float = 0.5
    samples: int = 32
    length: int = 128
    batch_size: int = 8
    floor: bool = True
    """Whether the floor is measured, too."""
    folder: str | None = None
    """Where the checkpoint is written for a while."""
    seed: int = 0

    def command(self) -> str:
        words = ["moepress bench memory"] + [f"--shape {shape}" for shape in self.shapes]
        words += [f"--method {method}" for method in self.methods] + [f"--memory {budget}" for budget in self.budgets]
        plain = Settings()
        for name in ("size", "keep", "samples", "length", "batch_size"):
            if getattr(self, name) != getattr(plain, name):
                words.append(f"--{name.replace('_', '-')} {getattr(self, name)}")
        return " ".join([*words, *([] if self.floor else ["--no-floor"])])


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
from moepress.checkpoint.load import load_model
load_model(asked["model"], paged=True)

def status(field):
    return int(open("/proc/self/status").read().split(field + ":")[1].split()[0]) * 1024

found = {"program": status("VmRSS")}
start, cpu = time.perf_counter(), time.process_time()
try:
    result = moepress.compress(asked["model"], asked["out"], **asked["options"])
    found |= {"stages": result.outcome.seconds, "after": result.after.bytes, "notes": result.outcome.notes}
except moepress.MoepressError as error:
    found["refused"] = str(error)
found |= {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu, "peak": status("VmHWM")}
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
            data["rows"] |= measure(shape, settings, Path(folder))
    tables = [table_of(data["rows"])]
    write(out, "memory", data, "Memory and time of compressing a random checkpoint", tables, drawing(data))
    return data, tables


def measure(shape: str, settings: Settings, folder: Path) -> dict[str, Any]:
    """Rows of the result by name."""
    from safetensors.torch import save_file

    model = folder / "model"
    model.mkdir()
    size = write_random(shape, parse_size(settings.size), model, settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    save_file(
        {"text": torch.randint(5, 32000, (settings.samples, settings.length), generator=generator)},
        folder / "text.safetensors",
    )
    text = folder / "text.safetensors"
    share, base = TARGET
    common: dict[str, Any] = {"shape": shape, "bytes": size, "allowed": share * size + base * 1e9}
    if settings.floor:
        common |= {"read": reading(model), "forward": calibrating(model, text, settings.batch_size)}
    rows: dict[str, Any] = {}
    for method in settings.methods:
        for budget in settings.budgets or (None,):
            given: dict[str, Any] = {"method": method, "keep": settings.keep, "calibration": str(text)}
            given |= {"calibration.batch_size": settings.batch_size, "memory": budget}
            name = ", ".join([shape, method, *([budget] if budget else [])])
            rows[name] = common | {"method": method, "budget": budget} | compressing(model, folder / "out", given)
    return rows


def compressing(model: Path, out: Path, options: dict[str, Any]) -> dict[str, Any]:
    asked = {"model": str(model), "out": str(out), "options": options}
    made = subprocess.run([sys.executable, "-c", CHILD, json.dumps(asked)], capture_output=True, text=True)
    shutil.rmtree(out, ignore_errors=True)
    if made.returncode:
        raise MoepressError(f"the compression failed: {(made.stderr.strip().splitlines() or ['it was killed'])[-1]}")
    return json.loads(made.stdout.strip().splitlines()[-1])


def reading(model: Path) -> float:
    """CPU seconds to read the whole checkpoint into one buffer."""
    files = TensorFiles(check_checkpoint(model))
    start = time.process_time()
    for name in files.header:
        for _ in files.pieces(name):
            pass
    seconds = time.process_time() - start
    files.close()
    return seconds


def calibrating(model: Path, text: Path, batch_size: int) -> float:
    """CPU seconds of the forward passes of the calibration text, up to the last MoE layer, without reading weights."""
    from moepress.checkpoint.paging import PagedWeights
    from moepress.data.batches import CalibrationData, calibration_batches
    from moepress.models.find import find_layers
    from moepress.models.walk import walk
    from moepress.models.weights import Weights

    paged = load_model(model, paged=True)
    weights = Weights.of(paged)
    assert isinstance(weights, PagedWeights)
    batches = calibration_batches(CalibrationData(source=str(text), batch_size=batch_size), None, paged.config)
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
    budgets = any(row["budget"] for row in rows.values())
    columns = ["checkpoint, method", "size", "peak memory", "of which program", "may take", "CPU seconds", "floor"]
    lines = []
    for name, row in rows.items():
        peak = f"refused: {row['refused']}" if "refused" in row else human_size(row["peak"])
        floor = f"{human_seconds(row['read'])} + {human_seconds(row['forward'])}" if "read" in row else ""
        may = row["budget"] or human_size(row["allowed"])
        size, program = human_size(row["bytes"]), human_size(row["program"])
        lines.append([name, size, peak, program, may, human_seconds(row["cpu"]), floor])
    note = "" if budgets else "May take: the aim, a quarter of the checkpoint and 0.6 GB. "
    note += (
        "Program: Python, its libraries and the model without weights, before anything is read. CPU seconds of one "
        "thread, those of the system included. Floor: reading the checkpoint once, and the forward passes of the "
        "calibration text alone."
    )
    return Table("A process of its own", columns, lines, note)


def drawing(data: dict[str, Any]) -> Any:
    def draw(file: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(6, 3))
        rows = {name: row for name, row in data["rows"].items() if "refused" not in row}
        for i, (key, label) in enumerate((("bytes", "checkpoint"), ("peak", "peak"), ("program", "program alone"))):
            heights = [row[key] / 1e9 for row in rows.values()]
            axes.bar([x + 0.27 * i for x in range(len(rows))], heights, 0.25, label=label)
        axes.set_xticks([x + 0.27 for x in range(len(rows))], list(rows), rotation=20, ha="right")
        axes.set_ylabel("GB")
        axes.legend(frameon=False)
        figure.tight_layout()
        figure.savefig(file, dpi=120)
        pyplot.close(figure)

    return draw
