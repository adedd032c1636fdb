"""`moepress bench merge`: merging the experts of one Switch layer, beside reading their bytes from the page cache."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moepress.align import ALIGNMENTS, SOLVERS
from moepress.bench.results import Table, write
from moepress.bench.side_by_side import bars, dtype_of, record
from moepress.bench.timing import Clock, Timing, take_turns
from moepress.bench.versions import Squeeze, on_device, shared_copy, switch_block
from moepress.checkpoint.files import TensorFiles
from moepress.checkpoint.headers import read_headers
from moepress.checkpoint.sizes import human_size
from moepress.merge import MERGES, install, merge_layer
from moepress.models.families.switch import SwitchAdapter
from moepress.models.layer import CompactSpec, MoELayer
from moepress.models.weights import Weights
from moepress.plan import Group, LayerPlan
from moepress.progress import track


@dataclass(frozen=True)
class Settings:
    width: int = 768
    hidden: int = 3072
    experts: int = 32
    keep: int = 8
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    repeats: int = 9
    folder: str | None = None
    """Where the layer is written for a while."""
    device: str = "cpu"
    seed: int = 0


WORDS = {
    "scan": "its bytes are read, one piece after the other into a small buffer",
    "read": "its bytes are read into memory of its size that is there",
    "load": "its bytes are read into new tensors",
    "plain": "merged with one torch operation after the other (the paper's way)",
    "merge": "moepress merges it, into new parameters of the layer",
}


def run(settings: Settings, folder: Path) -> tuple[dict[str, Any], list[Table]]:
    """Measure, and write merge.json, merge.md and merge.png."""
    lists = {"dtypes": "--dtype"}
    data = record("merge", settings, folder, lists, torch.device("cpu"), rows=measure(settings))
    tables = [table_of(data)]
    title = f"Merging {settings.experts} experts of a Switch layer into {settings.keep}"
    write(folder, "merge", data, title, tables, drawing(data))
    return data, tables


@torch.no_grad()
def measure(settings: Settings) -> list[dict[str, Any]]:
    """One record for each way and dtype. Alignment, which has a benchmark of its own, is left out."""
    Squeeze(settings.keep).check(settings.experts)
    records = []
    for dtype in track(settings.dtypes, "merge"):
        with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
            records += _measure(settings, dtype, Path(folder))
    return records


def _measure(settings: Settings, dtype: str, folder: Path) -> list[dict[str, Any]]:
    from safetensors.torch import save_file

    def make() -> Any:
        return switch_block(settings.width, settings.hidden, settings.experts)

    block = on_device(make, dtype_of(dtype), torch.device("cpu"), settings.seed)
    lay_side_by_side(block)
    state = {name: t for name, t in block.state_dict().items() if name.startswith("experts.")}
    save_file({name: t.clone() for name, t in state.items()}, folder / "layer.safetensors")
    held = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    files = TensorFiles(read_headers([folder / "layer.safetensors"]))
    bank, plan = SwitchAdapter().read_bank(block), plan_of(settings)
    experts = [bank.expert(e) for e in range(settings.experts)]
    copies = [shared_copy(block) for _ in range(settings.repeats + 2)]
    merged: list[Any] = []

    def scan() -> None:
        for name in state:
            for _ in files.pieces(name):
                pass

    def read() -> None:
        for name, tensor in held.items():
            files.read_into(name, tensor)

    def ours() -> None:
        merged[:] = [merge(copies.pop(), plan)]

    work: dict[str, Callable[[], object]] = {
        "scan": scan,
        "read": read,
        "load": lambda: [files.read(name) for name in state],
        "plain": lambda: plain(experts, plan),
        "merge": ours,
    }
    timings = take_turns(Clock.on(torch.device("cpu")), work, settings.repeats, warmup=2)
    files.close()
    found = SwitchAdapter().read_bank(merged[0])
    apart = max(
        float((found.expert(g)[name].float() - tensor.float()).abs().max())
        for g, expert in enumerate(plain(experts, plan))
        for name, tensor in expert.items()
    )
    return [
        {
            "way": name,
            "words": WORDS[name],
            "dtype": dtype,
            "bytes": sum(t.nbytes for t in state.values()),
            "seconds": timing.to_dict(),
            "to_read": timing.median / timings["read"].median,
            "to_load": timing.median / timings["load"].median,
        }
        | ({"apart": apart} if name == "merge" else {})
        for name, timing in timings.items()
    ]


def lay_side_by_side(block: Any) -> None:
    """As its experts lie when they were loaded to be compressed."""
    adapter = SwitchAdapter()
    bank, experts = adapter.read_bank(block), adapter.num_experts(block)
    adapter.reshape_experts(block, CompactSpec(experts, experts, capacity=adapter.capacity(block)))
    adapter.write_bank(block, bank)


def merge(block: Any, plan: LayerPlan) -> Any:
    """As a compression does it: in place, without alignment."""
    layer = MoELayer("layer", 0, block, SwitchAdapter(), Weights(block))
    operator, solver = MERGES.create("frequency"), SOLVERS.create("auto")
    merged = merge_layer(layer.bank, plan, operator, ALIGNMENTS.create("none"), solver)
    install(layer, plan, merged.experts)
    return block


def plan_of(settings: Settings) -> LayerPlan:
    """Groups of nearly the same size, with frequencies that differ."""
    groups = []
    for g in range(settings.keep):
        members = tuple(range(g, settings.experts, settings.keep))
        total = sum(range(1, len(members) + 1))
        weights = tuple((i + 1) / total for i in range(len(members)))
        groups.append(Group(leader=g, members=members, weights=weights))
    return LayerPlan(name="layer", experts=settings.experts, router="redirect", groups=tuple(groups))


def plain(experts: list[dict[str, Tensor]], plan: LayerPlan) -> list[dict[str, Tensor]]:
    """Sums of products, one tensor after the other."""
    made = []
    for group in plan.groups:
        chosen = list(zip(group.members, group.weights, strict=True))
        merged = {name: sum(experts[e][name].float() * w for e, w in chosen) for name in experts[0]}
        made.append({name: t.to(experts[0][name].dtype) for name, t in merged.items()})  # type: ignore[union-attr]
    return made


def table_of(data: dict[str, Any]) -> Table:
    cells = [
        [
            f"{row['dtype']}: {row['words']}",
            human_size(row["bytes"]),
            Timing(row["seconds"]["seconds"]).words(),
            f"{row['to_read']:.2f}",
            f"{row['to_load']:.2f}",
        ]
        for row in data["rows"]
    ]
    note = (
        f"Median of {data['settings']['repeats']} rounds in which the ways take turns (fastest – slowest), "
        f"{data['clock']}, the system's included. Experts are not aligned."
    )
    return Table("One layer", ["", "experts", "time", "to reading", "to reading into new tensors"], cells, note)


def drawing(data: dict[str, Any]) -> Callable[[Path], None]:
    dtypes = data["settings"]["dtypes"]
    groups = [{r["words"]: r["seconds"]["median"] for r in data["rows"] if r["dtype"] == dtype} for dtype in dtypes]
    return bars(list(dtypes), groups, data["clock"])
