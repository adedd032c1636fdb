"""`moepress bench layer`: one Switch layer in transformers' versions and in ours, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moepress.bench.results import Table, write
from moepress.bench.side_by_side import as_graph, bars, device_of, dtype_of, known, on_inputs, record
from moepress.bench.timing import Clock, Timing, take_turns
from moepress.bench.versions import SAME, VERSIONS, Squeeze, on_device, relative, switch_block
from moepress.progress import track


@dataclass(frozen=True)
class Settings:
    width: int = 768
    hidden: int = 3072
    experts: int = 32
    keep: int = 8
    rank: int = 32
    ratio: float = 0.1
    tokens: tuple[int, ...] = (1, 8, 64, 416)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    only: tuple[str, ...] = ()
    repeats: int = 9
    calls: int = 1
    """In each round, of each version."""
    device: str = "cpu"
    seed: int = 0

    @property
    def squeeze(self) -> Squeeze:
        return Squeeze(self.keep, self.rank, self.ratio)

    def names(self) -> list[str]:
        return [name for name in VERSIONS if not self.only or name in self.only or name in ("dense", "native")]


def run(settings: Settings, folder: Path) -> tuple[dict[str, Any], list[Table]]:
    """Measure, and write layer.json, layer.md and layer.png."""
    lists = {"tokens": "--tokens", "dtypes": "--dtype", "only": "--only"}
    data = record("layer", settings, folder, lists, device_of(settings.device), rows=measure(settings))
    tables = tables_of(data)
    title = f"A Switch layer of {settings.experts} experts, {settings.keep} of them kept"
    write(folder, "layer", data, title, tables, drawing(data))
    return data, tables


@torch.no_grad()
def measure(settings: Settings) -> list[dict[str, Any]]:
    """One record for each version, number of tokens and dtype: its seconds, and those of the dense layer and of the
    native layer in the same rounds."""
    known(settings.only, VERSIONS, "version")
    settings.squeeze.check(settings.experts)
    device, records = device_of(settings.device), []
    for dtype in settings.dtypes:
        versions = build(settings, dtype_of(dtype), device)
        for tokens in track(settings.tokens, f"layer, {dtype}"):
            records += _measure(settings, versions, tokens, dtype)
        del versions
    return records


def build(settings: Settings, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[Tensor], Tensor]]:
    def make() -> Any:
        return switch_block(settings.width, settings.hidden, settings.experts)

    block = on_device(make, dtype, device, settings.seed)
    return {name: VERSIONS[name].make(block, settings.squeeze).eval() for name in settings.names()}


def _measure(
    settings: Settings, versions: dict[str, Callable[[Tensor], Tensor]], tokens: int, dtype: str
) -> list[dict[str, Any]]:
    device = torch.device(settings.device)
    draw = torch.Generator(device).manual_seed(settings.seed + tokens)
    inputs = [
        torch.randn(1, tokens, settings.width, generator=draw, device=device).to(dtype_of(dtype))
        for _ in range(settings.calls * (settings.repeats + 2))
    ]
    outputs = {name: versions[name](inputs[0]).float() for name in versions}
    apart = {b: relative(outputs[a], outputs[b]) for a, b in SAME if a in outputs and b in outputs}
    runs: dict[str, Callable[[Tensor], object]] = dict(versions)
    if device.type == "cuda":
        graphs = {name: run for name, run in versions.items() if not VERSIONS[name].waits}
        runs |= {f"{name}, CUDA graph": as_graph(run, inputs) for name, run in graphs.items()}
    work = {name: _several(on_inputs(run, inputs), settings.calls) for name, run in runs.items()}
    timings = take_turns(Clock.on(device), work, settings.repeats, warmup=2)
    seconds = {name: timing.per(settings.calls) for name, timing in timings.items()}
    return [
        {
            "version": name,
            "words": words_of(name),
            "tokens": tokens,
            "dtype": dtype,
            "seconds": timing.to_dict(),
            "to_dense": timing.median / seconds["dense"].median,
            "to_native": timing.median / seconds["native"].median,
        }
        | ({"apart": apart[name]} if name in apart else {})
        for name, timing in seconds.items()
    ]


def _several(run: Callable[[], object], calls: int) -> Callable[[], None]:
    def work() -> None:
        for _ in range(calls):
            run()

    return work


def words_of(name: str) -> str:
    plain, graph, _ = name.partition(", CUDA graph")
    return VERSIONS[plain].words + graph


def tables_of(data: dict[str, Any]) -> list[Table]:
    settings = data["settings"]
    note = (
        f"Median of {settings['repeats']} rounds in which the versions take turns (fastest – slowest), "
        f"{data['clock']}. Every round has other tokens. The dense layer has the width and hidden units of one expert. "
        "moepress multiplies float32 matrices with oneDNN, the others as torch does."
    )
    tables = []
    for dtype in settings["dtypes"]:
        for tokens in settings["tokens"]:
            rows = [r for r in data["rows"] if (r["dtype"], r["tokens"]) == (dtype, tokens)]
            cells = [
                [
                    row["words"],
                    Timing(row["seconds"]["seconds"]).words(),
                    f"{row['to_native']:.2f}",
                    f"{row['to_dense']:.2f}",
                    f"{row['apart']:.0e}" if "apart" in row else "–",
                ]
                for row in rows
            ]
            columns = ["version", "time", "to all experts in transformers", "to dense", "apart from the reference"]
            tables.append(Table(f"{tokens} tokens, {dtype}", columns, cells))
    last = tables[-1]
    return [*tables[:-1], Table(last.title, last.columns, last.rows, note)]


def drawing(data: dict[str, Any]) -> Callable[[Path], None]:
    settings = data["settings"]
    tokens = max(settings["tokens"])
    groups = [
        {r["words"]: r["seconds"]["median"] for r in data["rows"] if (r["dtype"], r["tokens"]) == (dtype, tokens)}
        for dtype in settings["dtypes"]
    ]
    return bars([f"{tokens} tokens, {dtype}" for dtype in settings["dtypes"]], groups, data["clock"])
