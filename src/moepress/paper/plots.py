"""A line for each of several things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from moepress.report.style import LIGHT, MATPLOTLIB, PAPER


def lines(found: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str, file: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(MATPLOTLIB):  # type: ignore[arg-type]
        figure = Figure(figsize=(5.4, 3.4), layout="constrained")
        axes = figure.subplots()
        for number, (name, points) in enumerate(found.items()):
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=LIGHT[f"s{number % 8}"], label=name)
        axes.set(xlabel=x, ylabel=y, yscale="log")
        axes.grid(True)
        axes.legend()
        figure.savefig(file, dpi=150, facecolor=PAPER)
