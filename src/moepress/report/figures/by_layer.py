"""One number a layer: what the change did to its output, and how well its experts were aligned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moepress.report.chart import Cells, Chart
from moepress.report.figures.drawing import bars
from moepress.report.numbers import percent
from moepress.report.records import Records
from moepress.report.style import WARM

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def output_error(records: Records) -> Chart | None:
    found = records.summary.get("output_error") or {}
    names = [name for name in records.names if name in found]
    if not names:
        return None
    short, values = [records.short[name] for name in names], [found[name] for name in names]

    def draw(figure: Figure, wide: bool) -> Axes:
        axes = figure.subplots()
        bars(axes, short, [100 * v for v in values], wide, words=[percent(v) for v in values], colour=WARM)
        axes.set_ylabel("per cent")
        return axes

    return Chart(
        "output-error",
        "Damage to each layer's output",
        "Squared error of what the layer's experts put out, as a share of its energy, on the inputs that the layer had "
        "when it was changed.",
        draw,
        lambda wide: 2.4,
        ["layer", "relative_squared_error"],
        list(zip(names, values, strict=True)),
        Cells([""], [f"layer {name}" for name in short], [[percent(value) for value in values]]),
        wide=len(names) > 12,
    )


def alignment_gap(records: Records) -> Chart | None:
    found = records.summary.get("alignment_gap") or {}
    names = [name for name in records.names if name in found]
    if not names or not any(found.values()):
        return None
    short, values = [records.short[name] for name in names], [found[name] for name in names]

    def draw(figure: Figure, wide: bool) -> Axes:
        axes = figure.subplots()
        bars(axes, short, values, wide, words=[percent(v) for v in values])
        axes.yaxis.set_major_formatter(lambda value, _: percent(value))
        return axes

    return Chart(
        "alignment-gap",
        "How far an alignment can be from the best",
        "Proven bound on what the worst alignment of each layer misses.",
        draw,
        lambda wide: 2.4,
        ["layer", "certified_gap"],
        list(zip(names, values, strict=True)),
        Cells(
            [""],
            [f"layer {name}" for name in short],
            [[f"at most {percent(v)}" if v else "the best there is" for v in values]],
        ),
        wide=len(names) > 12,
    )
