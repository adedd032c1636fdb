"""What models cost to run: latency, throughput, operations, memory, size. The models take turns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from moepress.api import compress, open_source
from moepress.bench.results import Table, write
from moepress.bench.timing import Clock, Timing, machine, machine_words, take_turns
from moepress.checkpoint.sizes import human_size, sizes_of
from moepress.data.batches import is_encoder_decoder, vocabulary_of
from moepress.memory import peak_memory
from moepress.models.find import find_layers
from moepress.models.implementation import one_after_the_other
from moepress.paper.asked import Asked
from moepress.paper.plots import lines
from moepress.paper.tables.base import PAPER
from moepress.paper.tables.running import RUNNING


@dataclass(frozen=True)
class Running:
    asked: Asked
    batch_sizes: tuple[int, ...]
    source: int = 329
    """Tokens that a model reads."""
    target: int = 13
    """Tokens that an encoder–decoder model writes."""
    repeats: int = 5


def measure_running(given: Running, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Write TABLE.json, .md and .png."""
    asked, table = given.asked, RUNNING[given.asked.table]
    models = models_of(given, table.rows)
    device = next(next(iter(models.values())).parameters()).device
    described = machine(device)
    clock = Clock.on(device)
    data: dict[str, Any] = {
        "command": f"{asked.command()} --batch-sizes {','.join(map(str, given.batch_sizes))}",
        "settings": asdict(given),
        "machine": described | {"words": f"{machine_words(described)}; {clock.words}"},
        "rows": {},
    }
    for size in given.batch_sizes:
        inputs = {name: inputs_of(model, size, given, device) for name, model in models.items()}
        with torch.inference_mode():
            work = {name: partial(model, **inputs[name]) for name, model in models.items()}
            timings = take_turns(clock, work, given.repeats)
            for name, model in models.items():
                row = row_of(model, inputs[name], timings[name], size * given.source)
                data["rows"][f"{name} | {size}"] = {"row": name, "batch_size": size, **row}
    write(Path(folder), asked.table, data, table.title, tables_of(data), lambda file: draw(data, file))
    return data


def models_of(given: Running, rows: Mapping[str, Mapping[str, Any] | None]) -> dict[str, PreTrainedModel]:
    """By name of the row, all in memory, since they take turns."""
    asked = given.asked
    column = asked.columns()[0]
    found = {}
    if asked.dense is not None:
        found["dense"] = open_source(asked.dense, None, asked.device, False, None)[0]
    for name, recipe in rows.items():
        model, tokenizer, _ = open_source(asked.model, None, asked.device, False, None)
        if recipe is not None:
            first = find_layers(model)[0]
            keep = 0.25 if asked.keep is None else asked.keep
            made = asked.recipe({**PAPER, **recipe}, column, 0, keep, first.adapter.widths(first.block)[1])
            compress(model, tokenizer=tokenizer, recipe=made)
        found[name] = model.eval()
    return found


def inputs_of(model: PreTrainedModel, size: int, given: Running, device: torch.device) -> dict[str, torch.Tensor]:
    """The same random tokens for all."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary_of(model.config), (size, given.source + given.target), generator=generator)
    source, target = ids[:, : given.source].to(device), ids[:, given.source :].to(device)
    inputs = {"input_ids": source, "attention_mask": torch.ones_like(source)}
    return inputs | ({"decoder_input_ids": target} if is_encoder_decoder(model.config) else {})


def row_of(model: PreTrainedModel, inputs: dict[str, torch.Tensor], timing: Timing, tokens: int) -> dict[str, Any]:
    with peak_memory(next(model.parameters()).device) as peak:
        model(**inputs)
    sizes = sizes_of(model)
    return {
        "latency": timing.to_dict(),
        "tokens_per_ms": tokens / timing.median / 1000,
        "flops": flops_of(model, inputs),
        "bytes": sizes.bytes,
        "parameters": sizes.parameters,
        "peak_memory": peak.bytes,
    }


def flops_of(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> int:
    """Of the very tokens, by torch's counter. It does not see torch's own attention on a CPU, nor products that are
    grouped there, so both are replaced."""
    used = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with one_after_the_other(model), FlopCounterMode(display=False) as counter:
            model(**inputs)
    finally:
        model.set_attn_implementation(used)
    return counter.get_total_flops()


def tables_of(data: dict[str, Any]) -> list[Table]:
    table = RUNNING[data["settings"]["asked"]["table"]]
    head = ["", "batch", "latency", "tokens per ms", "GFLOPs", "weights", "peak memory", "parameters"]
    cells = [
        [
            row["row"],
            str(row["batch_size"]),
            Timing(row["latency"]["seconds"]).words(),
            f"{row['tokens_per_ms']:.3g}",
            f"{row['flops'] / 1e9:,.3g}",
            human_size(row["bytes"]),
            "unknown" if row["peak_memory"] is None else human_size(row["peak_memory"]),
            f"{row['parameters'] / 1e6:,.1f} M",
        ]
        for row in data["rows"].values()
    ]
    settings = data["settings"]
    note = (
        f"{settings['source']} random tokens a sample, and {settings['target']} written in encoder–decoder models. "
        f"Median of {settings['repeats']} passes (fastest – slowest), the models taking turns; FLOPs of the tokens "
        "that were run, by torch's counter; peak memory is that of the process on a CPU, all models included."
    )
    printed = [Table(f"{table.title}: printed in the paper ({where})", list(columns), [list(r) for r in rows])
               for where, columns, rows in table.printed]  # fmt: skip
    return [Table(table.title, head, cells, note), *printed]


def draw(data: dict[str, Any], file: Path) -> None:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in data["rows"].values():
        found.setdefault(row["row"], []).append((row["batch_size"], row["latency"]["median"]))
    lines(found, "samples of a batch", "seconds", file)
