"""Figures of the paper that the report of a single run does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moepress.report.chart import Chart
from moepress.report.figures.drawing import dots, name_ticks
from moepress.report.records import Records
from moepress.report.style import ACCENT, LIGHT, MUTED, WARM

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SERIES = [LIGHT[f"s{i}"] for i in range(8)]


def grouping(records: Records) -> Chart:
    """Who joined whom, all layers together: experts of one group have one number and one colour."""
    layers = records.plan.layers
    experts = max(layer.experts for layer in layers)
    group = np.full((len(layers), experts), np.nan)
    for row, layer in enumerate(layers):
        for place, each in enumerate(layer.groups):
            group[row, list(each.members)] = place
    leaders = [(each.leader, row) for row, layer in enumerate(layers) for each in layer.groups]

    def draw(figure: Figure, wide: bool) -> Axes:
        from matplotlib.colors import ListedColormap

        axes = figure.subplots()
        axes.imshow(group % len(SERIES), cmap=ListedColormap(SERIES), vmin=0, vmax=len(SERIES) - 1, aspect="auto",
                    interpolation="none", alpha=0.55)  # fmt: skip
        dots(axes, leaders, min(5.0, (30 if wide else 13) / experts**0.5), LIGHT["ink"])
        if experts <= 32:
            for (row, expert), place in np.ndenumerate(group):
                if np.isfinite(place):
                    axes.annotate(str(int(place)), (expert, row), (0, -11), textcoords="offset points", ha="center",
                                  fontsize=6, color=MUTED)  # fmt: skip
        name_ticks(axes.xaxis, [str(e) for e in range(experts)], 24 if wide else 12)
        name_ticks(axes.yaxis, [records.short[layer.name] for layer in layers], 24)
        axes.set(xlabel="expert", ylabel="MoE layer")
        return axes

    rows = [
        [layer.name, expert, place, expert == each.leader]
        for layer in layers
        for place, each in enumerate(layer.groups)
        for expert in each.members
    ]
    return Chart(
        "grouping",
        "Which experts are merged",
        "Experts of one colour and number are one group; a dot marks the dominant expert.",
        draw,
        lambda wide: 1.1 + 0.34 * len(layers),
        ["layer", "expert", "group", "leads"],
        rows,
        wide=True,
    )


def rank_changes(records: Records) -> dict[str, float]:
    """By layer: the mean over dominant experts of how their stable rank changed by merging, (after - before) / before.
    Those that nobody joined have not changed and count as well, as in the paper."""
    found = records.summary["stable_rank"]
    changes = {}
    for layer in records.plan.layers:
        if layer.name not in found:
            continue
        before, after = found[layer.name]["before"], found[layer.name]["after"]
        each = [after[place] / before[group.leader] - 1 for place, group in enumerate(layer.groups)]
        changes[layer.name] = float(np.mean(each))
    return changes


def stable_rank(records: Records) -> Chart:
    changes = rank_changes(records)
    names = [records.short[name] for name in changes]

    def draw(figure: Figure, wide: bool) -> Axes:
        axes = figure.subplots()
        values = [100 * value for value in changes.values()]
        axes.barh(range(len(names)), values, color=[ACCENT if value <= 0 else WARM for value in values])
        axes.axvline(0, color=MUTED, linewidth=1)
        name_ticks(axes.yaxis, names, 24)
        axes.invert_yaxis()
        axes.set(xlabel="change of the stable rank, per cent", ylabel="MoE layer")
        return axes

    return Chart(
        "stable-rank",
        "Stable rank of the dominant experts, before and after merging",
        "Mean over a layer's dominant experts of (after − before) / before. Negative: easier to decompose.",
        draw,
        lambda wide: 1.1 + 0.3 * len(names),
        ["layer", "change"],
        [[name, value] for name, value in changes.items()],
    )


def teaser(points: list[dict[str, Any]], what: str) -> Chart:
    """Quality against size, a point for each row of a table."""

    def draw(figure: Figure, wide: bool) -> Axes:
        axes = figure.subplots()
        for point in points:
            colour = WARM if "smoe" in point["row"] else ACCENT
            axes.scatter([point["bytes"] / 1e6], [point["value"]], s=26, color=colour)
            axes.annotate(point["row"], (point["bytes"] / 1e6, point["value"]), (5, 3), textcoords="offset points",
                          fontsize=8, color=MUTED)  # fmt: skip
        axes.set(xlabel="weights, MB", ylabel=what)
        axes.grid(True)
        return axes

    return Chart(
        "teaser",
        f"{what} against size",
        "A point for each row of the table.",
        draw,
        lambda wide: 3.4,
        ["row", "bytes", "value"],
        [[point["row"], point["bytes"], point["value"]] for point in points],
    )
