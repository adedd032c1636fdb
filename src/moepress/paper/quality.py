"""Make a table of quality: every row on every text or task, over seeds, through the public functions. What has been
measured is kept, and an interrupted table goes on."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from moepress.api import compress, open_source
from moepress.bench.results import continued, save, write
from moepress.bench.timing import machine, machine_words
from moepress.checkpoint.sizes import sizes_of
from moepress.errors import MoepressError
from moepress.fit import average_experts, check_fit, check_gradients, skipped_layers
from moepress.models.find import find_layers
from moepress.models.layer import CompactSpec, MoELayer
from moepress.observe import Statistics
from moepress.paper.asked import Asked, Column
from moepress.paper.cells import cell_key, ours_of, parts_of, rows_of
from moepress.paper.judges import Judge, judge_of
from moepress.paper.shared import SharedStatistics
from moepress.paper.tables import TABLES, Row
from moepress.paper.training import on_task, recovered
from moepress.paper.words import draw, tables_of
from moepress.planning import facts_of, planner_of
from moepress.progress import track
from moepress.recipe import Recipe


@dataclass(frozen=True)
class Place:
    """Where the rows of one column are measured."""

    column: Column
    source: str
    """The full model, that of the column's task."""
    original: PreTrainedModel
    tokenizer: Any
    judge: Judge


def make_table(asked: Asked, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Write TABLE.json, .md and .png, and return what is in the first."""
    folder = Path(folder)
    columns, rows = asked.columns(), rows_of(asked.table, asked.dense is not None)
    if asked.steps == 0 and any(part.trains for part in parts_of(asked.table)):
        raise MoepressError(f"table {asked.table!r} is about training: give --steps")
    original, tokenizer, _ = open_source(asked.model, None, asked.device, False, None)
    for row in rows:
        if row.recipe is not None:
            check(recipe_of(row, asked, columns[0], 0, original), original)
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
        if seed == 0 or random_in(row, asked)
    ]
    place: Place | None = None
    shared: SharedStatistics | None = None
    for seed, column, row in track(cells, asked.table):
        key = cell_key(row, column.name, seed)
        if key in data["rows"]:
            continue
        if place is None or place.column != column:
            place = place_of(column, asked, folder, original, tokenizer, judges[column.name])
        if shared is None or shared.place != (column.name, seed):
            recipes = [recipe_of(r, asked, column, seed, original) for r in rows if r.recipe is not None]
            shared = SharedStatistics((column.name, seed), place.original, tokenizer, recipes)
        data["rows"][key] = measure(row, place, seed, asked, folder, shared)
        save(folder, asked.table, data)
    data["rows"] = {cell_key(row, c.name, seed): data["rows"][cell_key(row, c.name, seed)] for seed, c, row in cells}
    title = f"{TABLES[asked.table].title}: {Path(asked.model).name}"
    write(folder, asked.table, data, title, tables_of(data), lambda file: draw(data, file))
    return data


def random_in(row: Row, asked: Asked) -> bool:
    """Whether another seed gives another result."""
    return row.recipe is not None or (row.zeroed and asked.steps > 0)


def place_of(
    column: Column, asked: Asked, folder: Path, original: PreTrainedModel, tokenizer: Any, judge: Judge
) -> Place:
    source = on_task(asked.model, column, asked, folder)
    if source == asked.model:
        return Place(column, source, original, tokenizer, judge)
    own = open_source(source, tokenizer, asked.device, False, None)[0]
    return Place(column, source, own, tokenizer, judge_of(column, asked, own, tokenizer))


def keep_of(asked: Asked) -> int | float:
    return TABLES[asked.table].keep if asked.keep is None else asked.keep


def recipe_of(row: Row, asked: Asked, column: Column, seed: int, model: PreTrainedModel) -> Recipe:
    given = dict(row.recipe or ours_of(asked.table))
    if row.schedule and asked.steps:
        given["decompose.ratio"] = 1  # S is pruned while it trains
    _, width = find_layers(model)[0].adapter.widths(find_layers(model)[0].block)
    return asked.recipe(given, column, seed, keep_of(asked), width)


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


def measure(row: Row, place: Place, seed: int, asked: Asked, folder: Path, shared: SharedStatistics) -> dict[str, Any]:
    start = time.perf_counter()
    model, groups = made(row, place, seed, asked, folder, shared)
    seconds = time.perf_counter() - start
    cell = {"seconds": seconds, "bytes": sizes_of(model).bytes, "groups": groups, **place.judge(model)}
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return cell


def made(
    row: Row, place: Place, seed: int, asked: Asked, folder: Path, shared: SharedStatistics
) -> tuple[PreTrainedModel, dict[str, list[list[int]]]]:
    """The model of a row, and by layer which experts are one."""
    if row.is_full:
        return place.original, {}
    if row.dense:
        source = on_task(str(asked.dense), place.column, asked, folder)
        return open_source(source, place.tokenizer, asked.device, False, None)[0], {}
    model = open_source(place.source, place.tokenizer, asked.device, False, None)[0]
    recipe = recipe_of(row, asked, place.column, seed, model)
    layers = find_layers(model)
    skipped = skipped_layers(recipe, model, layers)
    specs: dict[str, CompactSpec] = {}
    groups: dict[str, list[list[int]]] = {}
    if row.zeroed:
        zero_experts([layer for layer in layers if layer.name not in skipped])
    elif not (row.dies_out and asked.steps):
        done = compress(model, tokenizer=place.tokenizer, recipe=recipe, statistics=shared.of(recipe))
        specs = done.outcome.specs
        groups = {layer.name: [list(group.members) for group in layer.groups] for layer in done.outcome.plan.layers}
    if asked.steps:
        recovered(
            model, place.original, row, place.column, seed, asked, place.tokenizer, specs, skipped, keep_of(asked)
        )
    return model, groups


@torch.no_grad()
def zero_experts(layers: list[MoELayer]) -> None:
    """The control: the experts of these layers give nothing."""
    for layer in layers:
        layer.adapter.write_bank(layer.block, layer.bank.map(lambda _, tensor: torch.zeros_like(tensor)))
