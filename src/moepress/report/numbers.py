"""Numbers as people read them."""

from __future__ import annotations

import math

import numpy as np

from moepress.bench.timing import human_seconds
from moepress.checkpoint.sizes import human_size

__all__ = ["change", "count", "figure", "human_seconds", "human_size", "percent", "took"]


def count(number: float) -> str:
    """1234567 -> "1.23 M"."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f}"


def percent(share: float) -> str:
    """0.0000267 -> "0.0027 %": two digits, however small."""
    if not math.isfinite(share):
        return "–"
    value = 100 * share
    if abs(value) >= 9.95 or value == 0:
        return f"{value:.0f} %"
    return f"{np.format_float_positional(value, precision=2, fractional=False, trim='-')} %"


def change(before: float, after: float) -> str:
    """−36 %"""
    if not before:
        return ""
    share = round(100 * (after / before - 1), 1 if abs(after / before - 1) < 0.0995 else None)
    return f"{'−' if share < 0 else '+'}{abs(share):g} %"


def figure(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def took(seconds: float) -> str:
    """74 -> "1 min 14 s"."""
    if seconds < 0.001:
        return "0 s"
    if seconds < 100:
        return human_seconds(seconds)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
