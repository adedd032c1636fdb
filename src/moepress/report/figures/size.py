"""What the weights take before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moepress.report.chart import Cells, Chart
from moepress.report.numbers import change, human_size
from moepress.report.records import Records
from moepress.report.style import ACCENT, INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def size(records: Records) -> Chart:
    before, after = records.summary["before"], records.summary["after"]
    states = [("before", before), ("after", after)]

    def draw(figure: Figure, wide: bool) -> Axes:
        axes = figure.subplots()
        for y, (_, state) in enumerate(states):
            axes.barh(y, state["other_bytes"], height=0.56, color=MUTED, label="everything else" if y else None)
            axes.barh(
                y, state["expert_bytes"], 0.56, state["other_bytes"], color=ACCENT, label="experts" if y else None
            )
            axes.annotate(human_size(state["bytes"]), (state["bytes"], y), (6, 0), textcoords="offset points",
                          va="center", color=INK, fontsize=9)  # fmt: skip
        axes.set_yticks([0, 1], ["before", "after"])
        axes.invert_yaxis()
        axes.set_xticks([])
        axes.set_xlim(0, max(before["bytes"], after["bytes"]) * 1.24)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(length=0)
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.02), ncols=2, borderpad=0, handlelength=1, columnspacing=1)
        return axes

    return Chart(
        "size",
        "Size of the weights",
        f"Experts {change(before['expert_bytes'], after['expert_bytes'])}, all together "
        f"{change(before['bytes'], after['bytes'])}.",
        draw,
        lambda wide: 1.75,
        ["", *before],
        [[name, *(state[key] for key in before)] for name, state in states],
        Cells(
            ["before", "after"],
            [""],
            [[f"experts {human_size(s['expert_bytes'])}, everything else {human_size(s['other_bytes'])}"]
             for _, s in states],
        ),
    )  # fmt: skip
