"""The paper's figures that are drawn from one compression."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Picture:
    title: str
    where: str
    """In the paper: the label of the figure."""
    decomposed: bool = False
    """Of MC-SMoE; otherwise of M-SMoE."""
    keep: float = 0.25
    needs: str = "Figure. Needs a model, and text or tasks to calibrate on."


PICTURES = {
    "usage": Picture("How often each expert is used, for every text or task", "fig:usage"),
    "stable-rank": Picture("How merging changes the stable rank of dominant experts", "fig:stable-rank", True),
    "remaining": Picture("What MC-SMoE leaves of each dominant expert", "fig:dominant", True),
    "grouping": Picture("Which experts M-SMoE merges", "fig:grouping-restuls-sst2"),
}
