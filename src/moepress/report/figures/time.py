"""Where the time went, and how much memory was in use by then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moepress.report.chart import Cells, Chart
from moepress.report.figures.drawing import lying_bars
from moepress.report.numbers import human_size, took
from moepress.report.records import Records
from moepress.report.style import ACCENT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def time(records: Records) -> Chart | None:
    seconds, memory = records.summary["seconds"], records.summary.get("memory", {})
    if not seconds:
        return None
    stages = list(seconds)
    words = [took(seconds[s]) + (f" · {human_size(memory[s])}" if s in memory else "") for s in stages]

    def draw(figure: Figure, wide: bool) -> Axes:
        axes = figure.subplots()
        lying_bars(axes, stages, [seconds[stage] for stage in stages], words, ACCENT)
        axes.set_xlim(0, max(seconds.values()) * 1.6)
        return axes

    said = "Wall time of each stage" + (", and the most memory in use up to its end." if memory else ".")
    return Chart(
        "time",
        "Time and memory",
        said,
        draw,
        lambda wide: 0.5 + 0.34 * len(stages),
        ["stage", "seconds", "peak_bytes"],
        [[stage, seconds[stage], memory.get(stage, "")] for stage in stages],
        Cells(stages, [""], [[text] for text in words]),
    )
