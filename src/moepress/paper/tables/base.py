"""What a table of the paper is: rows, each something done to the model, and what the paper prints for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PAPER = {"method": "m-smoe", "preset": "paper"}
"""M-SMoE as Algorithm 1 says it."""

NEEDS = "Needs a model, and text or tasks."


@dataclass(frozen=True)
class Row:
    name: str
    recipe: Mapping[str, Any] | None = None
    """What `moepress.compress` is given beside the number of experts and the text; None: all experts stay."""
    paper: Mapping[str, str] = field(default_factory=dict)
    """Printed, by column."""
    zeroed: bool = False
    """The control: the experts of the layers that the others merge give nothing."""
    dense: bool = False
    """Another model: the dense one that was asked for."""
    schedule: str = ""
    """Where it is trained: how S is pruned meanwhile. Without training that is done in one go."""
    dies_out: bool = False
    """Where it is trained: experts are taken away meanwhile, from the full model."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Options of its recovery that differ from the others'."""

    @property
    def is_full(self) -> bool:
        return self.recipe is None and not self.zeroed and not self.dense


DENSE = Row("dense", dense=True)
FULL = Row("full")
CONTROL = Row("experts zeroed", zeroed=True)


@dataclass(frozen=True)
class Quality:
    """One table of quality."""

    name: str
    """Of the command."""
    title: str
    where: str
    """In the paper: the label of the table."""
    rows: tuple[Row, ...]
    ours: str
    """The row that the paper argues for: the others are compared with it, seed by seed."""
    columns: tuple[str, ...]
    """Of the paper."""
    keep: float = 0.25
    """Share of the experts that stay: 8 of 32."""
    trains: bool = False
    """Whether it says nothing without recovery."""
    printed_on: str = "switch-base-32, fine-tuned with distillation"

    @property
    def needs(self) -> str:
        return NEEDS + (" Trains: --steps." if self.trains else "")

    @property
    def measured(self) -> tuple[Row, ...]:
        """All rows, with the full model before them and the control behind."""
        known = any(row.is_full for row in self.rows)
        return (*(() if known else (FULL,)), *self.rows, CONTROL)


@dataclass(frozen=True)
class Several:
    """Tables that are made together: rows that they share are measured once."""

    name: str
    title: str
    parts: tuple[Quality, ...]
    where: str = ""

    @property
    def needs(self) -> str:
        return NEEDS

    @property
    def keep(self) -> float:
        return self.parts[0].keep
