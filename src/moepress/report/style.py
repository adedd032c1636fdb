"""Colours that follow the reader's light or dark mode, and how matplotlib is set up for them.

Figures are drawn in the colours of light mode. In the page, each of these exact colours becomes a CSS variable.
"""

from __future__ import annotations

from typing import Any

LIGHT = {
    "ink": "#18212b",
    "muted": "#5f6c7b",
    "line": "#dde3ea",
    "paper": "#fefefe",
    "faint": "#edf1f6",
    "accent": "#3a5bdb",
    "warm": "#e85a0c",
    "s0": "#3b5cda",
    "s1": "#e8590d",
    "s2": "#0c8598",
    "s3": "#c2265c",
    "s4": "#5c950d",
    "s5": "#7049e8",
    "s6": "#a87f00",
    "s7": "#495058",
}
DARK = {
    "ink": "#e7ecf2",
    "muted": "#9aa8b8",
    "line": "#2b3541",
    "paper": "#161c24",
    "faint": "#222b36",
    "accent": "#7f9cff",
    "warm": "#ff9a5c",
    "s0": "#7f9cfe",
    "s1": "#ff9a5d",
    "s2": "#3bc9da",
    "s3": "#f783ad",
    "s4": "#a9e34c",
    "s5": "#b197fd",
    "s6": "#ffd43c",
    "s7": "#ced4db",
}
SERIES = [name for name in LIGHT if name[0] == "s" and name[1].isdigit()]

INK, MUTED, LINE, PAPER, FAINT = (LIGHT[name] for name in ("ink", "muted", "line", "paper", "faint"))
ACCENT, WARM = LIGHT["accent"], LIGHT["warm"]

MATPLOTLIB: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: small files, the reader's font, can be searched and copied
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 1.0,
    "axes.grid": False,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def css_variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())
