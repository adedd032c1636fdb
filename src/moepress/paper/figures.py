"""Make the paper's figures: compress as it does, and draw what came about."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from moepress.api import Compressed, compress, open_source
from moepress.bench.timing import machine, machine_words
from moepress.errors import MoepressError
from moepress.models.find import find_layers
from moepress.paper import charts
from moepress.paper.asked import Asked, Column
from moepress.paper.cells import row_key, rows_of
from moepress.paper.tables.base import PAPER
from moepress.paper.tables.pictures import PICTURES
from moepress.progress import track
from moepress.report import figures
from moepress.report.chart import Chart, draw_chart
from moepress.report.records import Records

DRAW: dict[str, Callable[[Records], Chart | None]] = {
    "usage": figures.usage,
    "stable-rank": charts.stable_rank,
    "remaining": figures.remaining,
    "grouping": charts.grouping,
}


def make_figure(asked: Asked, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Write FIGURE-COLUMN.png, .svg and .csv for every column, and FIGURE.json."""
    folder = Path(folder)
    data: dict[str, Any] = {"command": asked.command(), "settings": asdict(asked), "columns": {}}
    for column in track(asked.columns(), asked.table):
        done = pressed(asked, column)
        described = machine(next(done.outcome.model.parameters()).device)
        data["machine"] = described | {"words": machine_words(described)}
        chart = DRAW[asked.table](records_of(done))
        if chart is None:
            raise MoepressError(f"there is nothing to draw in figure {asked.table!r}: no layer was changed")
        draw_chart(replace(chart, name=f"{asked.table}-{column.name}"), folder)
        data["columns"][column.name] = {
            "title": chart.title,
            "words": chart.words,
            "rows": [dict(zip(chart.columns, map(plain, row), strict=True)) for row in chart.rows],
        }
    (folder / f"{asked.table}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return data


def pressed(asked: Asked, column: Column) -> Compressed:
    picture = PICTURES[asked.table]
    model, tokenizer, _ = open_source(asked.model, None, asked.device, False, None)
    first = find_layers(model)[0]
    given = PAPER | ({"method": "mc-smoe"} if picture.decomposed else {})
    keep = picture.keep if asked.keep is None else asked.keep
    recipe = asked.recipe(given, column, 0, keep, first.adapter.widths(first.block)[1])
    return compress(model, tokenizer=tokenizer, recipe=recipe)


def records_of(done: Compressed) -> Records:
    """As the report of an output reads them, of a compression in memory."""
    found = done.outcome.statistics.layers
    return Records(
        Path(),
        done.report(),
        done.outcome.recipe.to_yaml(),
        done.outcome.plan,
        usage={name: s["usage"].sums["count"].numpy() for name, s in found.items() if "usage" in s},
    )


def plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def make_teaser(folder: str | os.PathLike[str], column: str | None = None) -> Path:
    """Quality against size, of a main table that was made into the same folder."""
    file = Path(folder) / "main.json"
    if not file.is_file():
        raise MoepressError(f"the figure is drawn from the main table, and {file} is not there: moepress paper main")
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    columns = list(dict.fromkeys(key.partition(" | ")[0] for key in rows))
    chosen = column or columns[0]
    if chosen not in columns:
        raise MoepressError(f"the table in {file} has no column {chosen!r}: it has {', '.join(columns)}")
    points, what = teaser_points(rows, chosen)
    draw_chart(replace(charts.teaser(points, what), name=f"teaser-{chosen}"), Path(folder))
    return Path(folder) / f"teaser-{chosen}.png"


def teaser_points(rows: dict[str, dict[str, Any]], column: str) -> tuple[list[dict[str, Any]], str]:
    points = []
    for row in rows_of("main", dense=True):
        keys = [key for key in rows if key.split(" | ", 2)[::2] == [column, row_key(row)]]
        if keys:
            found = [next(iter(rows[key]["shown"].values())) for key in keys]
            points.append({"row": row.name, "bytes": fmean(rows[k]["bytes"] for k in keys), "value": fmean(found)})
    return points, next(iter(next(rows[key] for key in rows if key.startswith(f"{column} |"))["shown"]))
