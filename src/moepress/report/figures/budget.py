"""How many experts each layer keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moepress.report.chart import Cells, Chart
from moepress.report.figures.drawing import bars
from moepress.report.records import Records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def budget(records: Records) -> Chart:
    layers = records.plan.layers
    names = [records.short[layer.name] for layer in layers]

    def draw(figure: Figure, wide: bool) -> Axes:
        axes = figure.subplots()
        kept = [layer.physical for layer in layers]
        bars(axes, names, kept, wide, [layer.experts for layer in layers], [str(k) for k in kept])
        axes.set_ylabel("experts")
        axes.locator_params(axis="y", integer=True)
        return axes

    return Chart(
        "budget",
        "Experts that each layer keeps",
        "Pale: the layer as it was. A layer whose bar is full was left whole.",
        draw,
        lambda wide: 2.4,
        ["layer", "experts", "kept"],
        [[layer.name, layer.experts, layer.physical] for layer in layers],
        Cells(
            [""], [f"layer {name}" for name in names], [[f"{layer.physical} of {layer.experts}" for layer in layers]]
        ),
        wide=len(layers) > 12,
    )
