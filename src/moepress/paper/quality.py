"""Make a table of quality: every row on every text or task, over seeds, through the public functions. What has been
measured is kept, and an interrupted table goes on."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from moepress.api import compress, open_source
from moepress.bench.results import continued, save, write
from moepress.bench.timing import machine, machine_words
from moepress.checkpoint.sizes import sizes_of
from moepress.fit import average_experts, check_fit, check_gradients, skipped_layers
from moepress.models.find import find_layers
from moepress.observe import Statistics
from moepress.paper.asked import Asked, Column
from moepress.paper.cells import cell_key, ours_of, rows_of
from moepress.paper.judges import Judge, judge_of
from moepress.paper.shared import SharedStatistics
from moepress.paper.tables import TABLES, Row
from moepress.paper.words import draw, tables_of
from moepress.planning import facts_of, planner_of
from moepress.progress import track
from moepress.recipe import Recipe


def make_table(asked: Asked, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Write TABLE.json, .md and .png, and return what is in the first."""
    folder = Path(folder)
    columns = asked.columns()
    original, tokenizer, _ = open_source(asked.model, None, asked.device, False, None)
    rows = rows_of(asked.table)
    for row in rows:
        if row.recipe is not None:
            check(asked.recipe(row.recipe, columns[0], 0, keep_of(asked)), original)
    judges = {column.name: judge_of(column, asked, original, tokenizer) for column in columns}
    data = continued(
        folder,
        asked.table,
        {"command": asked.command(), "settings": asdict(asked) | {"keep": keep_of(asked)}, "rows": {}},
        may_grow=("seeds", "tasks"),
    )
    described = machine(next(original.parameters()).device)
    data["machine"] = described | {"words": machine_words(described)}
    cells = [
        (seed, column, row)
        for seed in range(asked.seeds)
        for column in columns
        for row in rows
        if row.recipe is not None or seed == 0  # nothing random is done to the others
    ]
    shared: SharedStatistics | None = None
    for seed, column, row in track(cells, asked.table):
        key = cell_key(row, column.name, seed)
        if key in data["rows"]:
            continue
        if shared is None or shared.place != (column.name, seed):
            recipes = [asked.recipe(r.recipe, column, seed, keep_of(asked)) for r in rows if r.recipe is not None]
            shared = SharedStatistics((column.name, seed), original, tokenizer, recipes)
        data["rows"][key] = measure(row, column, seed, asked, original, tokenizer, judges[column.name], shared)
        save(folder, asked.table, data)
    data["rows"] = {cell_key(row, c.name, seed): data["rows"][cell_key(row, c.name, seed)] for seed, c, row in cells}
    title = f"{TABLES[asked.table].title}: {Path(asked.model).name}"
    write(folder, asked.table, data, title, tables_of(data), lambda file: draw(data, file))
    return data


def keep_of(asked: Asked) -> int | float:
    return TABLES[asked.table].keep if asked.keep is None else asked.keep


def check(recipe: Recipe, model: PreTrainedModel) -> None:
    """Refuse now what compression would refuse, of any row."""
    layers = find_layers(model)
    check_fit(recipe, layers)
    skipped = skipped_layers(recipe, model, layers)
    average = average_experts(recipe, model, layers, skipped)
    planner = planner_of(recipe)
    if not recipe.keeps_all:
        planner.check(facts_of(layers, Statistics(), recipe), skipped, average)
    check_gradients(recipe, planner.needs, model, layers)


def measure(
    row: Row,
    column: Column,
    seed: int,
    asked: Asked,
    original: PreTrainedModel,
    tokenizer: Any,
    judge: Judge,
    shared: SharedStatistics,
) -> dict[str, Any]:
    start = time.perf_counter()
    model = original
    groups: dict[str, list[list[int]]] = {}
    if row.recipe is not None:
        recipe = asked.recipe(row.recipe, column, seed, keep_of(asked))
        model = open_source(asked.model, tokenizer, asked.device, False, None)[0]
        done = compress(model, tokenizer=tokenizer, recipe=recipe, statistics=shared.of(recipe))
        groups = {layer.name: [list(group.members) for group in layer.groups] for layer in done.outcome.plan.layers}
    elif row.zeroed:
        model = open_source(asked.model, tokenizer, asked.device, False, None)[0]
        zero_experts(model, asked.recipe(ours_of(asked.table), column, seed, keep_of(asked)))
    seconds = time.perf_counter() - start
    cell = {"seconds": seconds, "bytes": sizes_of(model).bytes, "groups": groups, **judge(model)}
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return cell


@torch.no_grad()
def zero_experts(model: PreTrainedModel, recipe: Recipe) -> None:
    """The control: nothing of the experts is left in the layers that this recipe merges."""
    layers = find_layers(model)
    skipped = skipped_layers(recipe, model, layers)
    for layer in layers:
        if layer.name not in skipped:
            layer.adapter.write_bank(layer.block, layer.bank.map(lambda _, tensor: torch.zeros_like(tensor)))
