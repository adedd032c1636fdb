"""What a table of quality found, beside what the paper prints: as tables and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moepress.bench.results import Table
from moepress.checkpoint.sizes import human_size
from moepress.comparison.tables import Spread
from moepress.paper.cells import cell_key, parts_of
from moepress.paper.tables import Quality, Row

Cell = dict[str, Any]


def tables_of(data: dict[str, Any]) -> list[Table]:
    return [table for part in parts_of(data["settings"]["table"]) for table in (measured(part, data), printed(part))]


def cells_of(data: dict[str, Any], row: Row, column: str) -> list[Cell]:
    """One a seed."""
    keys = [cell_key(row, column, seed) for seed in range(data["settings"]["seeds"])]
    return [data["rows"][key] for key in keys if key in data["rows"]]


def columns_of(data: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(key.partition(" | ")[0] for key in data["rows"]))


def measured(part: Quality, data: dict[str, Any]) -> Table:
    columns = columns_of(data)
    ours = next(row for row in part.rows if row.name == part.ours)
    shown = {c: list(cells_of(data, ours, c)[0]["shown"]) for c in columns}
    head = ["", "weights"]
    for column in columns:
        head += [*shown[column], f"against {part.ours}"]
    rows = []
    for row in part.measured:
        first = cells_of(data, row, columns[0])
        if not first:
            continue  # no dense model was asked for
        cells = [row.name, human_size(round(Spread([cell["bytes"] for cell in first]).mean))]
        for column in columns:
            found = cells_of(data, row, column)
            cells += [Spread([cell["shown"][name] for cell in found]).words(form_of(name)) for name in shown[column]]
            cells.append("" if row is ours or row.is_full else difference(found, cells_of(data, ours, column)))
        rows.append(cells)
    seeds = data["settings"]["seeds"]
    spread = f"Mean ± standard deviation over {seeds} seeds" if seeds > 1 else "One seed"
    steps = data["settings"]["steps"]
    trained = f"Recovered in {steps} steps, all alike" if steps else "Not trained after compression"
    what = "loss on text" if steps else "KL on text"
    note = (
        f"{trained}. {spread}, each with other calibration samples; {kept(data)} of the experts of merged layers stay "
        f"on average. Against {part.ours}: the difference seed by seed ({what}, or the first metric of a task), and on "
        "how many seeds it is worse. The control, experts zeroed, says how much there is to lose."
    )
    return Table(part.title, head, rows, note)


def kept(data: dict[str, Any]) -> str:
    keep = data["settings"]["keep"]
    return f"{100 * keep:g} %" if isinstance(keep, float) else str(keep)


def form_of(name: str) -> str:
    return "{:.1f}" if name.endswith("%") else "{:.4f}"


def difference(found: list[Cell], ours: list[Cell]) -> str:
    """Seed by seed: on the same calibration samples. A row without anything random is one for all seeds."""
    found = found * len(ours) if len(found) == 1 else found
    pairs = list(zip(found, ours, strict=True))
    better = ours[0]["better"]
    gaps = [cell["value"] - own["value"] for cell, own in pairs]
    worse = sum(gap > 0 if better == "lower" else gap < 0 for gap in gaps)
    form = "{:+.4f}" if better == "lower" else "{:+.1f}"
    spread = Spread(gaps)
    words = form.format(spread.mean)
    if spread.deviation is not None:
        words += f" ± {form.format(spread.deviation).lstrip('+')}"
    return f"{words}, worse {worse}/{len(pairs)}"


def printed(part: Quality) -> Table:
    rows = [[row.name, *(row.paper.get(column, "") for column in part.columns)] for row in part.rows if row.paper]
    return Table(f"{part.title}: printed in the paper", ["", *part.columns], rows, f"{part.printed_on} ({part.where}).")


def draw(data: dict[str, Any], file: Path) -> None:
    """A dot for each seed, a line for their mean."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from moepress.report.style import ACCENT, MATPLOTLIB, MUTED, PAPER, WARM

    columns, parts = columns_of(data), parts_of(data["settings"]["table"])
    names = [(part, row) for part in parts for row in part.rows if cells_of(data, row, columns[0])]
    with rc_context(MATPLOTLIB):  # type: ignore[arg-type]
        figure = Figure(figsize=(3.2 + 3.6 * len(columns), 1.2 + 0.28 * len(names)), layout="constrained")
        grid = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
        for axes, column in zip(grid, columns, strict=True):
            for y, (part, row) in enumerate(names):
                values = [cell["value"] for cell in cells_of(data, row, column)]
                colour = WARM if row.name == part.ours else ACCENT
                axes.scatter(values, [y] * len(values), s=14, color=colour, alpha=0.6)
                axes.scatter([sum(values) / len(values)], [y], marker="|", s=160, color=colour)
                if y and part is not names[y - 1][0]:
                    axes.axhline(y - 0.5, color=MUTED, linewidth=0.6)
            cell = cells_of(data, names[0][1], column)[0]
            what = next(iter(cell["shown"]))
            if cell["better"] == "lower" and not data["settings"]["steps"]:
                what = "KL to the original"
            axes.set(title=column, xlabel=f"{what}, {cell['better']} is better")
            axes.set_yticks(range(len(names)), [row.name for _, row in names])
        grid[0].invert_yaxis()
        figure.savefig(file, dpi=150, facecolor=PAPER)
