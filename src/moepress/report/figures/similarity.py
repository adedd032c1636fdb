"""How alike a layer's experts are, with the groups that were made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moepress.plan import LayerPlan
from moepress.report.chart import Cells, Chart
from moepress.report.figures.drawing import heat, name_ticks
from moepress.report.records import Records
from moepress.report.style import WARM

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def similarity(records: Records, layer: LayerPlan) -> Chart | None:
    found = records.similarity.get(layer.name)
    if found is None or len(found) < 2:
        return None
    groups = [[group.leader, *(e for e in group.members if e != group.leader)] for group in layer.groups]
    order = [expert for group in sorted(groups, key=len, reverse=True) for expert in group] + list(layer.dropped)
    ordered = found[np.ix_(order, order)].astype(np.float64)
    others = ordered[~np.eye(len(order), dtype=bool)]
    names = [str(expert) for expert in order]
    short = records.short[layer.name]

    def draw(figure: Figure, wide: bool) -> Axes:
        from matplotlib.patches import Rectangle

        axes = figure.subplots()
        heat(figure, axes, ordered, float(others.min()), float(np.quantile(others, 0.998)), "similarity")
        start = 0
        for group in sorted(groups, key=len, reverse=True):
            if len(group) > 1:
                box = (start - 0.5, start - 0.5), len(group), len(group)
                axes.add_patch(Rectangle(*box, fill=False, edgecolor=WARM, linewidth=1.6, clip_on=False, zorder=5))
            start += len(group)
        for axis in (axes.xaxis, axes.yaxis):
            name_ticks(axis, names, 16)
        axes.set_xlabel("expert, in the order of the groups")
        return axes

    return Chart(
        f"similarity-{short}",
        f"Layer {short}: how alike",
        "Framed: experts that became one.",
        draw,
        lambda wide: 3.9,
        ["expert", *names],
        [[name, *(f"{value:.6g}" for value in row)] for name, row in zip(names, ordered, strict=True)],
        Cells([f"expert {e}" for e in order], [f"expert {e}" for e in order], values=ordered, unit=""),
    )
