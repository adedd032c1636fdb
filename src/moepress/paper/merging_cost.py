"""What merging costs, stage by stage, for more and more layers: alignment, grouping, averaging."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moepress.api import open_source
from moepress.bench.results import Table, write
from moepress.bench.timing import Clock, human_seconds, machine, machine_words
from moepress.checkpoint.sizes import human_size
from moepress.data.batches import calibration_batches
from moepress.errors import MoepressError
from moepress.fit import average_experts, check_fit, skipped_layers
from moepress.memory import peak_memory
from moepress.models.find import find_layers
from moepress.models.walk import walk
from moepress.models.weights import Weights
from moepress.observe import Statistics
from moepress.paper.asked import Asked
from moepress.paper.plots import lines
from moepress.paper.tables.base import PAPER
from moepress.pipeline import calibration_dtype
from moepress.plan import LayerPlan
from moepress.planning import facts_of, planner_of
from moepress.progress import track
from moepress.rebuild import align_to_first, rebuild

TITLE = "What merging costs"
STAGES = ("alignment", "grouping", "averaging")
PRINTED = {
    "alignment": (
        ("2.35 min", "4.61 min", "6.54 min", "8.40 min", "10.30 min", "12.30 min"),
        ("1.23 GB", "2.36 GB", "3.48 GB", "4.61 GB", "5.73 GB", "6.86 GB"),
    ),
    "grouping": (
        ("8.0 s", "8.2 s", "8.2 s", "8.3 s", "8.2 s", "8.2 s"),
        ("4.19 GB", "5.29 GB", "6.39 GB", "7.48 GB", "8.58 GB", "9.68 GB"),
    ),
    "averaging": (
        ("23 ms", "44 ms", "66 ms", "87 ms", "109 ms", "139 ms"),
        ("1.33 GB", "1.83 GB", "2.32 GB", "2.82 GB", "3.31 GB", "3.81 GB"),
    ),
}
"""Time and memory with 2, 4, … 12 layers."""


def measure_merging(asked: Asked, counts: tuple[int, ...], folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Write merging-cost.json, .md and .png. Without `counts`: two layers, four, and so on to all."""
    column = asked.columns()[0]
    model = open_source(asked.model, None, asked.device, False, None)[0]
    there = len(find_layers(model))
    counts = counts or tuple(range(2, there + 1, 2)) or (there,)
    if not all(1 <= count <= there for count in counts):
        raise MoepressError(f"the model has {there} MoE layers: {max(counts)} of them cannot be merged")
    clock = Clock.on(next(model.parameters()).device)
    described = machine(clock.device)
    data: dict[str, Any] = {
        "command": f"{asked.command()} --layers {','.join(map(str, counts))}",
        "settings": asdict(asked) | {"layers": counts},
        "machine": described | {"words": f"{machine_words(described)}; {clock.words}"},
        "rows": {},
    }
    del model
    stages(asked, column, 1, clock)  # what is compiled or loaded at first is nobody's cost
    for count in track(counts, asked.table):
        data["rows"][str(count)] = stages(asked, column, count, clock)
    write(Path(folder), asked.table, data, TITLE, tables_of(data), lambda file: draw(data, file))
    return data


def stages(asked: Asked, column: Any, count: int, clock: Clock) -> dict[str, dict[str, Any]]:
    """Merge the first so many MoE layers of a fresh model, a stage at a time."""
    model, tokenizer, _ = open_source(asked.model, None, asked.device, False, None)
    layers = find_layers(model)
    rest = [layer.name for layer in layers[count:]]
    keep = 0.25 if asked.keep is None else asked.keep
    recipe = asked.recipe({**PAPER, "plan.skip": rest or "none"}, column, 0, keep)
    check_fit(recipe, layers)
    skipped, planner = skipped_layers(recipe, model, layers), planner_of(recipe)
    average = average_experts(recipe, model, layers, skipped)
    merged = layers[:count]
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    text = calibration_batches(recipe.calibration, tokenizer, model.config, shift=shift)
    plans: dict[str, LayerPlan] = {}

    def group() -> None:
        statistics, weights = Statistics(), Weights.of(model)
        with weights.widened(calibration_dtype(recipe, weights.device)):
            for visit in walk(model, text, layers=merged):
                statistics.gather(visit, planner.needs)
        keeps = planner.counts(facts_of(layers, statistics, recipe), skipped, average)
        for facts in facts_of(merged, statistics, recipe):
            plans[facts.name] = planner.layer(facts, keeps[facts.name])

    work: dict[str, Callable[[], Any]] = {
        "alignment": lambda: [align_to_first(layer, recipe) for layer in merged],
        "grouping": group,
        "averaging": lambda: [rebuild(layer, plans[layer.name], recipe) for layer in merged],
    }
    found = {}
    for stage, run in work.items():
        with peak_memory(clock.device) as peak:
            seconds, _ = clock.time(run)
        found[stage] = {"seconds": seconds, "peak_memory": peak.bytes}
    return found


def tables_of(data: dict[str, Any]) -> list[Table]:
    counts = list(data["rows"])
    rows = []
    for stage in STAGES:
        cells = [data["rows"][count][stage] for count in counts]
        rows.append([stage, "time", *(human_seconds(cell["seconds"]) for cell in cells)])
        peaks = [cell["peak_memory"] for cell in cells]
        rows.append([stage, "peak memory", *("unknown" if p is None else human_size(p) for p in peaks)])
    note = (
        "The first so many MoE layers of the model are merged; alignment is to each layer's first expert, grouping the "
        "pass over the calibration text and the choice of groups. Peak memory is that of the process on a CPU."
    )
    shown = [[stage, what, *PRINTED[stage][i]] for stage in STAGES for i, what in enumerate(("time", "memory"))]
    head = ["stage", "", *(f"{count} layers" for count in counts)]
    printed = Table(
        f"{TITLE}: printed in the paper (tab:merging-costs)", ["stage", "", *map(str, range(2, 13, 2))], shown
    )
    return [Table(TITLE, head, rows, note), printed]


def draw(data: dict[str, Any], file: Path) -> None:
    found = {stage: [(int(count), row[stage]["seconds"]) for count, row in data["rows"].items()] for stage in STAGES}
    lines(found, "MoE layers that are merged", "seconds", file)
