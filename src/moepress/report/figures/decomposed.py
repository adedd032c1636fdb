"""What low rank and sparsity made of each expert; nothing where experts were left as full matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moepress.report.chart import Cells, Chart
from moepress.report.figures.drawing import heat, name_ticks
from moepress.report.numbers import percent
from moepress.report.records import Records
from moepress.report.style import ACCENT, LINE, MUTED, WARM

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def stable_rank(records: Records) -> Chart | None:
    """`stable_rank` of the summary: by layer, `before` and `after` with a number for each expert."""
    found = records.summary.get("stable_rank") or {}
    names = [name for name in records.names if name in found]
    if not names:
        return None
    short = [records.short[name] for name in names]
    means = {when: [float(np.mean(found[name][when])) for name in names] for when in ("before", "after")}

    def draw(figure: Figure, wide: bool) -> Axes:
        axes = figure.subplots()
        y = range(len(names))
        axes.hlines(y, means["before"], means["after"], color=LINE, linewidth=3)
        for when, colour in (("before", MUTED), ("after", WARM)):
            spread = [np.ptp(found[name][when]) / 2 for name in names]
            middle = [(np.max(found[name][when]) + np.min(found[name][when])) / 2 for name in names]
            axes.errorbar(middle, y, xerr=spread, fmt="none", ecolor=colour, alpha=0.45, linewidth=1)
            axes.scatter(means[when], y, s=30, color=colour, zorder=3, label=when)
        name_ticks(axes.yaxis, short, 24)
        axes.invert_yaxis()
        axes.set(xlabel="stable rank ‖W‖²_F / ‖W‖²₂", ylabel="MoE layer")
        axes.xaxis.grid(True)
        axes.tick_params(length=0)
        axes.legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
        return axes

    rows = [[n, w, e, value] for n in names for w in ("before", "after") for e, value in enumerate(found[n][w])]
    words = [[f"{means['before'][i]:.3g} → {means['after'][i]:.3g}"] for i in range(len(names))]
    return Chart(
        "stable-rank",
        "Stable rank of the experts",
        "Mean and range over each layer's experts. What has a lower stable rank loses less as a product of thin "
        "matrices.",
        draw,
        lambda wide: 1.1 + len(names) * max(0.12, min(0.32, 6 / len(names))),
        ["layer", "when", "expert", "stable_rank"],
        rows,
        Cells([f"layer {name}" for name in short], [""], words),
    )


def remaining(records: Records) -> Chart | None:
    """`remaining` of the summary: by layer, the share of its parameters that each expert still has."""
    found = records.summary.get("remaining") or {}
    names = [name for name in records.names if name in found]
    if not names:
        return None
    short = [records.short[name] for name in names]
    share = np.full((len(names), max(len(found[name]) for name in names)), np.nan)
    for row, name in enumerate(names):
        share[row, : len(found[name])] = found[name]
    experts = share.shape[1]

    def draw(figure: Figure, wide: bool) -> Axes:
        axes = figure.subplots()
        heat(figure, axes, 100 * share, 0, 100 * float(np.nanmax(share)), "per cent of an expert's parameters", ACCENT)
        name_ticks(axes.xaxis, [str(e) for e in range(experts)], 24 if wide else 12)
        name_ticks(axes.yaxis, short, 24)
        axes.set(xlabel="expert", ylabel="MoE layer")
        return axes

    return Chart(
        "remaining",
        "Parameters that each expert still has",
        "As a share of those of a full expert.",
        draw,
        lambda wide: 1.1 + len(names) * max(0.1, min(0.34, 7 / len(names))),
        ["layer", "expert", "share"],
        [[name, e, value] for name in names for e, value in enumerate(found[name])],
        Cells(
            [f"layer {name}" for name in short],
            [f"expert {e}" for e in range(experts)],
            [[percent(v) if np.isfinite(v) else "" for v in row] for row in share],
        ),
        wide=True,
    )
