"""A chart: how it is drawn, what it says where one points, and its data as a table."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moepress.report.style import LIGHT, MATPLOTLIB, PAPER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINKED = 32_000
"""Bytes of a table that a link in the page may hold; a larger one lies beside the page only."""
NARROW, WIDE = 3.9, 10.4
"""Inches of 72 units: a phone, and both columns of a desk."""

Draw = Callable[["Figure", bool], "Axes"]
"""Draws into a figure, wide or not, and returns the axes that answer when one points at them."""


@dataclass(frozen=True)
class Cells:
    """What a grid of equal cells says, rows from the top."""

    rows: Sequence[str]
    columns: Sequence[str]
    text: list[list[str]] | None = None
    values: np.ndarray | None = None
    """(rows, columns), instead of text: sent with 8 bits each, which is as exact as the picture."""
    unit: str = ""

    def to_json(self) -> dict[str, Any]:
        said: dict[str, Any] = {"rows": list(self.rows), "columns": list(self.columns)}
        if self.values is None:
            return said | {"text": self.text}
        low, high = float(np.nanmin(self.values)), float(np.nanmax(self.values))
        levels = np.rint((self.values - low) / ((high - low) or 1.0) * 255).astype(np.uint8)
        return said | {"z": base64.b64encode(levels.tobytes()).decode(), "low": low, "high": high, "unit": self.unit}


@dataclass(frozen=True)
class Points:
    """What single points say; in data coordinates."""

    x: Sequence[float]
    y: Sequence[float]
    text: Sequence[str]


@dataclass(frozen=True)
class Chart:
    name: str
    """Of its files."""
    title: str
    words: str
    """What one sees, in a sentence or two."""
    draw: Draw
    height: Callable[[bool], float]
    """Inches, wide or not."""
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    hover: Cells | Points | None = None
    wide: bool = False
    """Drawn a second time for wide screens, over both columns."""

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        return text.getvalue()


@dataclass
class Drawn:
    """A chart as SVG for the page, once for each width."""

    chart: Chart
    table: str
    """Its data, as CSV."""
    svg: dict[str, str] = field(default_factory=dict)
    boxes: dict[str, Any] = field(default_factory=dict)
    """Where the answering axes, or the points, lie in each: in shares of width and height from the top left."""

    @property
    def hover(self) -> str:
        own = self.chart.hover.to_json() if isinstance(self.chart.hover, Cells) else {}
        return json.dumps(own | {"at": self.boxes}, separators=(",", ":"), ensure_ascii=False)

    @property
    def data(self) -> str:
        """The table as something that a link can hold; nothing where it is large."""
        table = self.table.encode()
        return "data:text/csv;base64," + base64.b64encode(table).decode() if len(table) <= LINKED else ""


def write_table(chart: Chart, folder: Path) -> str:
    """Write NAME.csv, and return what is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    table = chart.csv()
    (folder / f"{chart.name}.csv").write_text(table, encoding="utf-8")
    return table


def draw_chart(chart: Chart, folder: Path) -> Drawn:
    """Write NAME.svg, NAME.png and NAME.csv, and return what the page shows."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    drawn = Drawn(chart, write_table(chart, folder))
    settings: Any = MATPLOTLIB | {"svg.hashsalt": chart.name}
    with rc_context(settings):
        for wide in (False, True) if chart.wide else (False,):
            figure = Figure(figsize=(WIDE if wide else NARROW, chart.height(wide)), layout="constrained")
            axes = chart.draw(figure, wide)
            plain = _svg(figure)
            figure.set_layout_engine("none")  # it is settled
            width = "wide" if wide else "narrow"
            drawn.boxes[width] = _box(figure, axes, chart.hover)
            drawn.svg[width] = inline(plain, f"{chart.name}-{width}")
        (folder / f"{chart.name}.svg").write_text(plain, encoding="utf-8")
        figure.savefig(folder / f"{chart.name}.png", dpi=150, facecolor=PAPER)
    return drawn


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _box(figure: Figure, axes: Axes, hover: Cells | Points | None) -> Any:
    shares = figure.transFigure.inverted()
    if isinstance(hover, Points):
        at = shares.transform(axes.transData.transform(np.column_stack([hover.x, hover.y])))
        return [[round(float(x), 4), round(1 - float(y), 4), text] for (x, y), text in zip(at, hover.text, strict=True)]
    (left, low), (right, high) = shares.transform(axes.bbox.get_points())
    return [round(float(value), 5) for value in (left, 1 - high, right, 1 - low)]


_DECIMALS = re.compile(r"(\.\d\d)\d+")
"""A hundredth of a point is finer than a screen; six decimals would be half of a page."""


def inline(svg: str, prefix: str) -> str:
    """SVG that can stand among others in a page and follows its colours and font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', "", svg, count=1)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r' (d|x|y)="[^"]*"', lambda m: _DECIMALS.sub(r"\1", m[0]), svg)
    svg = svg.replace("'DejaVu Sans'", "var(--font)")
    for name, colour in LIGHT.items():
        svg = svg.replace(colour, f"var(--{name})")
    return re.sub(r">\s+<", "><", svg).replace("<svg", '<svg role="img" class="plot"', 1)
