"""Usage heat map: the paper's figure of expert activation frequencies, for any model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moepress.report.chart import Cells, Chart
from moepress.report.figures.drawing import dots, heat, name_ticks
from moepress.report.numbers import percent
from moepress.report.records import Records
from moepress.report.style import WARM

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def usage(records: Records) -> Chart | None:
    layers = [layer for layer in records.plan.layers if layer.name in records.usage]
    if not layers:
        return None
    experts = max(layer.experts for layer in layers)
    share = np.full((len(layers), experts), np.nan)
    for row, layer in enumerate(layers):
        count = records.usage[layer.name]
        share[row, : layer.experts] = count / max(count.sum(), 1)
    leaders = [(group.leader, row) for row, layer in enumerate(layers) for group in layer.groups]
    names = [records.short[layer.name] for layer in layers]
    merged = any(len(group.members) > 1 for layer in layers for group in layer.groups)
    verb = "leads a group" if merged else "stays"

    def says(row: int, expert: int) -> str:
        if expert >= layers[row].experts:
            return ""
        return percent(share[row, expert]) + (f", {verb}" if (expert, row) in kept else "")

    kept = set(leaders)

    def draw(figure: Figure, wide: bool) -> Axes:
        axes = figure.subplots()
        top = float(np.nanquantile(share, 0.995))
        heat(figure, axes, 100 * share, 0, 100 * top or 1, "per cent of the layer's routing decisions")
        dots(axes, leaders, min(5.0, (30 if wide else 13) / experts**0.5), WARM)
        name_ticks(axes.xaxis, [str(e) for e in range(experts)], 24 if wide else 12)
        name_ticks(axes.yaxis, names, 24)
        axes.set(xlabel="expert", ylabel="MoE layer")
        return axes

    rows = [
        [layer.name, expert, int(records.usage[layer.name][expert]), share[row, expert], (expert, row) in kept]
        for row, layer in enumerate(layers)
        for expert in range(layer.experts)
    ]
    return Chart(
        "usage",
        "Which experts the router uses",
        f"Share of each layer's routing decisions on the calibration text. A dot marks an expert that {verb}.",
        draw,
        lambda wide: 1.1 + len(layers) * max(0.1, min(0.34, 7 / len(layers))),
        ["layer", "expert", "chosen", "share", verb.replace(" ", "_")],
        rows,
        Cells(
            [f"layer {name}" for name in names],
            [f"expert {e}" for e in range(experts)],
            text=[[says(row, e) for e in range(experts)] for row in range(len(layers))],
        ),
        wide=True,
    )
