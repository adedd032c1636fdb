"""What a comparison found, as a page: quality against size, one line a method, with the spread over seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepress.checkpoint.sizes import human_size
from moepress.comparison.tables import Spread, by_size, over_seeds, tables_of
from moepress.report.chart import Chart, Points, draw_chart
from moepress.report.numbers import took
from moepress.report.page import Page, Section, Tile
from moepress.report.style import LIGHT, MUTED, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vP"
ROUNDING = "rounding"


def write_page(data: dict[str, Any], folder: Path, name: str) -> Path:
    """NAME.html, and the figure as NAME.svg, NAME.png and NAME.csv."""
    drawn = draw_chart(quality_against_size(data, name), folder)
    settings, best = data["settings"], nearest(data)
    seeds = settings["seeds"]
    machine = data.get("machine", {}).get("words", "")
    return Page(
        title=f"{Path(settings['model']).name}: methods compared",
        kicker="moepress comparison",
        lead="Every method had the same calibration text, and every result is judged by the same held-out text"
        + (f", {seeds} seeds each." if seeds > 1 else "."),
        tiles=[
            Tile("Original", human_size(data["original"]["bytes"]), f"perplexity {data['original']['perplexity']:.4g}"),
            *(
                Tile(f"Nearest at {size}", method, f"KL {kl.words('{:.3g}')}, {human_size(b)}")
                for size, method, kl, b in best
            ),
        ],
        sections=[
            Section("Quality against size", charts=[drawn]),
            Section("All numbers", tables=tables_of(data)),
        ],
        command=data["command"],
        footer=f"{machine}. The figure as {name}.svg and {name}.png, its data as {name}.csv, and every number as "
        f"{name}.json beside this page.",
    ).write(folder / f"{name}.html")


def nearest(data: dict[str, Any]) -> list[tuple[str, str, Spread, float]]:
    """At each size that methods were asked for, the one nearest to the original."""
    found = []
    for size, methods in by_size(data).items():
        if rows := {method: over_seeds(made, "kl") for method, made in methods.items() if method != ROUNDING}:
            method = min(rows, key=lambda method: rows[method].mean)
            found.append((size, method, rows[method], over_seeds(methods[method], "bytes").mean))
    return found


def lines(data: dict[str, Any]) -> dict[str, list[tuple[str, float, Spread, list[dict[str, Any]]]]]:
    """By method its sizes from the smallest: what was asked for, bytes, KL, and the rows."""
    found: dict[str, list[tuple[str, float, Spread, list[dict[str, Any]]]]] = {}
    for size, methods in by_size(data).items():
        for method, rows in methods.items():
            point = size, over_seeds(rows, "bytes").mean, over_seeds(rows, "kl"), rows
            found.setdefault(method, []).append(point)
    return {method: sorted(points, key=lambda point: point[1]) for method, points in found.items()}


def quality_against_size(data: dict[str, Any], name: str) -> Chart:
    methods = lines(data)
    original = data["original"]["bytes"]

    def draw(figure: Figure, wide: bool) -> Axes:
        axes = figure.subplots()
        others = [method for method in methods if method != ROUNDING]
        for method, points in methods.items():
            plain = method == ROUNDING
            i = 0 if plain else others.index(method)
            axes.errorbar(
                [b / 1e6 for _, b, _, _ in points],
                [kl.mean for _, _, kl, _ in points],
                yerr=[kl.deviation or 0.0 for _, _, kl, _ in points],
                color=MUTED if plain else LIGHT[SERIES[i % len(SERIES)]],
                marker="s" if plain else MARKERS[i // len(SERIES) % len(MARKERS)],
                linestyle=":" if plain else "-",
                linewidth=2,
                markersize=6,
                capsize=3,
                label="plain rounding" if plain else method,
            )
        axes.axvline(original / 1e6, color=MUTED, linewidth=1, linestyle="--")
        axes.annotate("original", (original / 1e6, 1), (-4, -4), xycoords=("data", "axes fraction"),
                      textcoords="offset points", ha="right", va="top", color=MUTED, fontsize=8.5)  # fmt: skip
        axes.set(xlabel="weights, MB", ylabel="KL to the original, nats per token", yscale="log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
        axes.tick_params(which="minor", labelsize=8, length=0)
        axes.tick_params(which="major", length=0)
        axes.yaxis.grid(True)
        axes.spines["left"].set_visible(False)
        figure.legend(loc="outside lower left", ncols=5 if wide else 2)
        return axes

    points = [(method, *point) for method, own in methods.items() for point in own]
    return Chart(
        name,
        "Quality against size",
        "Lower is nearer to the original, further left is smaller. Bars are the standard deviation over seeds.",
        draw,
        lambda wide: (3.9 if wide else 3.2) + 0.22 * -(-len(methods) // (5 if wide else 2)),
        ["method", "size", "bytes", "kl", "kl_deviation", "seeds"],
        [[m, size, round(b), kl.mean, kl.deviation or "", len(rows)] for m, size, b, kl, rows in points],
        Points(
            [b / 1e6 for _, _, b, _, _ in points],
            [kl.mean for _, _, _, kl, _ in points],
            [
                f"{m}, {size}: KL {kl.words('{:.3g}')}, {human_size(b)}, {took(over_seeds(rows, 'seconds').mean)}"
                for m, size, b, kl, rows in points
            ],
        ),
        wide=True,
    )
