"""The report of one compression."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

from moepress.bench.results import Table
from moepress.plan import LayerPlan
from moepress.report import figures
from moepress.report.chart import Chart, Drawn, draw_chart, write_table
from moepress.report.numbers import change, count, figure, human_size, percent, took
from moepress.report.page import Choice, Details, Page, Section, Tile
from moepress.report.records import FIGURES, PAGE, Records, read_records

CELLS = 200_000
"""Cells of similarity matrices that the page shows; where there are more, it shows some of the layers."""


def draw_report(folder: Path, every_layer: bool = False) -> Path:
    """Write report.html and the folder of figures into a folder of records; returns the page. Of layers that a large
    model's page leaves out, figures are drawn only if `every_layer`; their data are written in any case."""
    records = read_records(folder)
    return page_of(records, folder / FIGURES, every_layer).write(folder / PAGE)


def page_of(records: Records, folder: Path, every_layer: bool = False) -> Page:
    def drawn(*charts: Chart | None) -> list[Drawn]:
        return [draw_chart(chart, folder) for chart in charts if chart is not None]

    summary = records.summary
    sections = [
        Section(
            "Size and quality",
            *_quality_words(records),
            charts=drawn(
                figures.size(records),
                *(figures.by_domain(entry["score"], i) for i, entry in enumerate(records.evaluations)),
            ),
            tables=evaluation_tables(records),
        ),
        Section(
            "Where the experts went",
            _plan_words(records),
            charts=drawn(figures.usage(records), figures.budget(records)),
            choice=_layer_choice(records, folder, every_layer),
        ),
    ]
    damage = drawn(
        figures.output_error(records),
        figures.alignment_gap(records),
        figures.stable_rank(records),
        figures.remaining(records),
    )
    if damage:
        sections.append(Section("What it did to each layer", _damage_words(records), charts=damage))
    used = {"moepress": summary["moepress"], **summary["versions"]}
    versions = "\n".join(f"{name} {number}" for name, number in used.items())
    sections.append(
        Section(
            "How it was done",
            charts=drawn(figures.time(records)),
            details=[
                Details("Recipe", records.recipe),
                Details("Versions", versions),
            ],
        )
    )
    share = summary["after"]["bytes"] / summary["before"]["bytes"]
    return Page(
        title=f"{summary.get('model') or 'The model'} at {percent(share)} of its size",
        kicker=f"moepress report · {summary['method']} · {summary['format']} format",
        lead=lead_of(records),
        tiles=_tiles(records),
        sections=sections,
        command=summary.get("command", ""),
        footer=f"Made by moepress {summary['moepress']} from the values saved beside this page. Every figure as SVG "
        f"and PNG, and its data as CSV: folder {FIGURES}/ beside this page.",
        notes=summary.get("notes", []),
    )


def _tiles(records: Records) -> list[Tile]:
    summary = records.summary
    before, after = summary["before"], summary["after"]
    experts = sum(layer.experts for layer in records.plan.layers)
    left = sum(layer.physical for layer in records.plan.layers)
    tiles = [
        Tile(
            "Weights",
            change(before["bytes"], after["bytes"]),
            f"{human_size(before['bytes'])} → {human_size(after['bytes'])}",
        ),
        Tile("Parameters", count(after["parameters"]), f"of {count(before['parameters'])}"),
        Tile("Experts", f"{left}", f"of {experts}, in {len(records.plan.layers)} layers"),
    ]
    for entry in records.evaluations[:1]:
        score = entry["score"]
        if "kl" in score:
            words = f"{percent(score['agreement'])} the same first choice"
            tiles.append(Tile("KL to the original", f"{score['kl']:.3g}", words))
        if "perplexity" in score and "original_perplexity" in score:
            own = f"{score['perplexity']:.4g}"
            tiles.append(Tile("Perplexity", own, f"the original {score['original_perplexity']:.4g}"))
    seconds, memory = sum(summary["seconds"].values()), summary.get("memory", {})
    peak = f"{human_size(max(memory.values()))} of memory" if memory else ""
    tiles.append(Tile("Took", took(seconds), peak))
    return tiles


def lead_of(records: Records) -> str:
    summary = records.summary
    merged = sum(len(group.members) - 1 for layer in records.plan.layers for group in layer.groups)
    dropped = sum(len(layer.dropped) for layer in records.plan.layers)
    done = " and ".join(
        [f"merged {merged} experts into others"] * bool(merged) + [f"dropped {dropped} experts"] * bool(dropped)
    )
    how = (
        "It loads in transformers after import moepress."
        if summary["format"] == "compact"
        else "It loads without moepress, wherever the original loads."
    )
    return f"Method {summary['method']} {done or 'left every expert as it was'}. {how}"


def _quality_words(records: Records) -> tuple[str]:
    if records.evaluations:
        return ("Measured on held-out text, against the original model.",)
    return (
        "Quality has not been measured yet. `moepress evaluate OUT --against ORIGINAL --text held-out.jsonl` "
        "measures it and adds it here.",
    )


def evaluation_tables(records: Records) -> list[Table]:
    tables = []
    for entry in records.evaluations:
        score: dict[str, Any] = entry["score"]
        columns = [name for name in score if name not in ("domains", "task")]
        label = lambda name: name.replace("_", " ").replace("kl", "KL")  # noqa: E731
        rows = [["all", *(figure(score[name]) for name in columns)]]
        rows += [
            [domain, *(figure(own.get(name, "")) for name in columns)]
            for domain, own in score.get("domains", {}).items()
        ]
        asked = entry["asked"]
        what = asked.get("text") or asked.get("task") or ""
        words = ["moepress", "evaluate", "OUT"]
        words += [part for name, value in asked.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        tables.append(Table(f"On {Path(what).name}", ["", *map(label, columns)], rows, shlex.join(words)))
    return tables


def _plan_words(records: Records) -> str:
    layers = records.plan.layers
    counts = sorted({layer.physical for layer in layers})
    same = f"{counts[0]} experts in every layer" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} experts a layer"
    picked = records.summary.get("picked") or {}
    said = f"{same}, {sum(layer.experts for layer in layers) / len(layers):g} before."
    if picked:
        won = {name: list(picked.values()).count(name) for name in sorted(set(picked.values()))}
        said += " Several criteria competed for each layer; layers won: "
        said += ", ".join(f"{name} {layers_won}" for name, layers_won in won.items()) + "."
    return said


def _damage_words(records: Records) -> str:
    solved = records.summary.get("alignments") or {}
    if not (total := sum(solved.values())):
        return ""
    worst = records.summary["worst_alignment_gap"]
    proof = f"is proven to be within {percent(worst)} of the best" if worst else "is proven to be the best there is"
    return f"Hidden units were matched in {total} pairs of experts; each matching {proof}."


def _layer_choice(records: Records, folder: Path, every_layer: bool) -> Choice | None:
    changed = [layer for layer in records.plan.layers if not layer.untouched]
    if not changed:
        return None
    shown = set(_some(changed, sum(layer.experts**2 for layer in changed)))
    options = []
    for layer in changed:
        charts = [chart for chart in (figures.similarity(records, layer), figures.groups(records, layer)) if chart]
        if layer.name in shown:
            options.append((records.short[layer.name], [draw_chart(chart, folder) for chart in charts]))
            continue
        for chart in charts:
            (draw_chart if every_layer else write_table)(chart, folder)
    words = ""
    if len(shown) < len(changed):
        words = f"{len(shown)} of {len(changed)} changed layers are shown; the data of all are in the folder {FIGURES}/"
        words += ", their figures too." if every_layer else ". `moepress report OUT --every-layer` draws all."
    return Choice("Layer", options, words)


def _some(layers: list[LayerPlan], cells: int) -> list[str]:
    """All layers, or as many as keep the page small, at equal distances."""
    if cells <= CELLS:
        return [layer.name for layer in layers]
    many = max(2, math.floor(len(layers) * CELLS / cells))
    step = (len(layers) - 1) / (many - 1)
    return [layers[round(i * step)].name for i in range(many)]
