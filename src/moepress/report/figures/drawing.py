"""What several figures draw in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moepress.report.style import ACCENT, FAINT, LINE, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def heat(
    figure: Figure, axes: Axes, values: np.ndarray, low: float, high: float, label: str, colour: str = ACCENT
) -> None:
    """Cells of one colour, from nothing to full: it looks right on any background."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgb

    map_ = LinearSegmentedColormap.from_list("fade", [(*to_rgb(colour), 0.02), (*to_rgb(colour), 1.0)])
    norm = Normalize(low, high, clip=True)
    axes.imshow(values, cmap=map_, norm=norm, interpolation="none", aspect="auto")
    bar = figure.colorbar(
        ScalarMappable(norm, map_), ax=axes, location="top", shrink=0.45, aspect=26, pad=0.02, anchor=(0.0, 0.5)
    )
    bar.solids.set_rasterized(True)  # type: ignore[union-attr]
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.xaxis.set_ticks_position("bottom")
    bar.ax.tick_params(length=0, pad=2)
    bar.set_label(label, loc="left")
    bar.set_ticks([low, (low + high) / 2, high], labels=[f"{value:.2g}" for value in (low, (low + high) / 2, high)])
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_color(LINE)
    axes.tick_params(length=0)


def dots(axes: Axes, places: Sequence[tuple[float, float]], width: float, colour: str) -> None:
    """Round dots of some points as a single path, however many there are: lines with round ends, of hardly any length
    (those without are left out of PNGs)."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    ends = [(x + along, y) for x, y in places for along in (0, 1e-3)]
    path = Path(ends, [Path.MOVETO, Path.LINETO] * len(places))
    path.should_simplify = False  # it would leave out lines of such a length
    axes.add_patch(PathPatch(path, fill=False, edgecolor=colour, linewidth=width, capstyle="round", snap=False))


def name_ticks(axis: Any, names: Sequence[str], room: int) -> None:
    """Names at equal distances, as many as there is room for."""
    step = -(-len(names) // max(room, 1))
    chosen = list(range(0, len(names), step))
    axis.set_ticks(chosen, [names[i] for i in chosen])


def across(names: Sequence[str], wide: bool) -> int:
    """How many names fit side by side."""
    longest = max(map(len, names), default=1)
    return max(2, int((60 if wide else 20) / max(longest, 2) * 1.6))


def bars(
    axes: Axes,
    names: Sequence[str],
    values: Sequence[float],
    wide: bool,
    behind: Sequence[float] | None = None,
    words: Sequence[str] = (),
    colour: str = ACCENT,
) -> None:
    """One bar for each name, left to right; with the number on it where there is room."""
    x = range(len(names))
    width = 0.72 if len(names) < 40 else 0.86
    if behind is not None:
        axes.bar(x, behind, width=width, color=FAINT)
    axes.bar(x, values, width=width, color=colour)
    if words and len(names) <= (24 if wide else 8):
        for i, value in enumerate(values):
            axes.annotate(
                words[i], (i, value), (0, 3), textcoords="offset points", ha="center", va="bottom", fontsize=8.5
            )
    name_ticks(axes.xaxis, names, across(names, wide))
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.spines["left"].set_visible(False)
    axes.tick_params(length=0)
    axes.yaxis.grid(True)
    axes.set_xlabel("MoE layer")
    axes.margins(y=0.12)
    axes.locator_params(axis="y", nbins=5)


def lying_bars(axes: Axes, names: Sequence[str], values: Sequence[float], words: Sequence[str], colour: str) -> None:
    """One bar below the other, what it says behind its end."""
    y = range(len(names))
    axes.barh(y, values, height=0.62, color=colour)
    for i, value in enumerate(values):
        axes.annotate(words[i], (value, i), (5, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(list(y), list(names))
    axes.tick_params(axis="y", labelcolor=MUTED)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_xlim(0, max([*values, 1e-12]) * 1.38)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)
