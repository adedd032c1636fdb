"""Which expert went where, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moepress.plan import LayerPlan
from moepress.report.chart import Chart, Points
from moepress.report.numbers import percent
from moepress.report.records import Records
from moepress.report.style import ACCENT, LINE, MUTED, WARM

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def listed(experts: Sequence[int], most: int = 12) -> str:
    """Each member of a large group says who is in it: all of them would be a text of the square of its size."""
    said = ", ".join(map(str, experts[:most]))
    return f"{said} and {len(experts) - most} more" if len(experts) > most else said


def groups(records: Records, layer: LayerPlan) -> Chart:
    """Original experts above, those that are left below; a line is as thick as what an expert counts in its group."""
    short = records.short[layer.name]
    usage = records.usage.get(layer.name)
    total = float(usage.sum()) if usage is not None else 0.0

    def above(expert: int) -> tuple[float, float]:
        return (expert + 0.5) / layer.experts, 1.0

    def below(place: int) -> tuple[float, float]:
        return (place + 0.5) / layer.physical, 0.0

    def used(expert: int) -> str:
        return f", used for {percent(float(usage[expert]) / total)}" if usage is not None and total else ""

    said: list[tuple[tuple[float, float], str]] = []
    rows: list[list[object]] = []
    for place, group in enumerate(layer.groups):
        many = len(group.members) > 1
        for expert, weight in zip(group.members, group.weights, strict=True):
            role = "leads" if expert == group.leader else "joins"
            words = f"{role} {listed(group.members)} with weight {percent(weight)}" if many else "stays"
            said.append((above(expert), f"expert {expert}{used(expert)}: {words}"))
            rows.append([expert, place, role if many else "stays", weight])
        said.append((below(place), f"new expert {place}: made of {listed(group.members)}"))
    for expert in layer.dropped:
        said.append((above(expert), f"expert {expert}{used(expert)}: dropped"))
        rows.append([expert, "", "dropped", 0])

    def draw(figure: Figure, wide: bool) -> Axes:
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        axes = figure.subplots()
        size = max(4.0, min(34.0, 700 / layer.experts))
        for place, group in enumerate(layer.groups):
            x1, y1 = below(place)
            for expert, weight in zip(group.members, group.weights, strict=True):
                x0, y0 = above(expert)
                curve = Path([(x0, y0), (x0, 0.45), (x1, 0.55), (x1, y1)], [Path.MOVETO, *[Path.CURVE4] * 3])
                leads = expert == group.leader
                thick = (0.5 + 4.5 * weight) * min(1.0, 24 / layer.experts) + 0.3
                axes.add_patch(
                    PathPatch(curve, fill=False, edgecolor=ACCENT if leads else WARM, linewidth=thick, alpha=0.75)
                )
        leaders = [group.leader for group in layer.groups]
        followers = sorted(e for group in layer.groups for e in group.members if e != group.leader)
        for experts, colour in ((leaders, ACCENT), (followers, WARM)):
            axes.scatter([above(e)[0] for e in experts], [1.0] * len(experts), s=size, color=colour, zorder=3)
        gone = [above(e)[0] for e in layer.dropped]
        axes.scatter(gone, [1.0] * len(gone), s=size, marker="x", color=MUTED, linewidths=1, zorder=3)
        axes.scatter(
            [below(p)[0] for p in range(layer.physical)], [0.0] * layer.physical, s=size, color=ACCENT, zorder=3
        )
        if layer.experts <= 20:
            for expert in range(layer.experts):
                axes.annotate(str(expert), above(expert), (0, 7), textcoords="offset points", ha="center", fontsize=7.5,
                              color=MUTED)  # fmt: skip
        axes.set(xlim=(0, 1), ylim=(-0.12, 1.2), xticks=[], yticks=[])
        axes.text(0, 1.2, f"{layer.experts} experts before", va="bottom", color=MUTED, fontsize=8.5)
        axes.text(0, -0.12, f"{layer.physical} after", va="top", color=MUTED, fontsize=8.5)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.axhline(1, color=LINE, linewidth=1, zorder=0)
        axes.axhline(0, color=LINE, linewidth=1, zorder=0)
        return axes

    merged = any(len(group.members) > 1 for group in layer.groups)
    words = "A line is as thick as the expert's weight in its group; blue leads." if merged else "A cross: dropped."
    return Chart(
        f"groups-{short}",
        f"Layer {short}: who became what",
        words,
        draw,
        lambda wide: 2.6,
        ["expert", "new_expert", "role", "weight"],
        sorted(rows, key=lambda row: int(str(row[0]))),
        Points([x for (x, _), _ in said], [y for (_, y), _ in said], [text for _, text in said]),
    )
