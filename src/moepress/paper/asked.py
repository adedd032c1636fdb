"""What somebody asks of a table: the model, the text or the tasks, and how thoroughly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from moepress.api import prepare_recipe
from moepress.errors import MoepressError
from moepress.methods import METHODS
from moepress.recipe import Recipe


@dataclass(frozen=True)
class Column:
    """A table is made on one text, or on each of some tasks."""

    name: str
    calibration: str
    text: str | None = None
    """Held-out text to judge by, or else the column is a task."""

    @property
    def place(self) -> str:
        """Of a task: its name, and its folder if one was given."""
        return self.calibration.removeprefix("task:")


@dataclass(frozen=True)
class Asked:
    table: str
    model: str
    text: str | None = None
    calibration: str | None = None
    """Beside `text`; a task is calibrated on its own training split."""
    tasks: tuple[str, ...] = ()
    """`sst2`, or `sst2@FOLDER`."""
    keep: int | float | None = None
    """None: the paper's share."""
    seeds: int = 3
    """Each draws other calibration samples."""
    samples: int | str = 256
    """Of calibration."""
    limit: int | str = "all"
    """Samples of held-out text, or records of a task."""
    length: int = 512
    batch_size: int = 8
    scoring: str | None = None
    steps: int = 0
    """Of recovery after compression; 0: none."""
    lr: float | None = None
    """Of recovery."""
    train_batch_size: int = 16
    train_samples: int | str = "all"
    finetune: float | None = None
    """Epochs in which the full model learns each task first; None: it knows it."""
    dense: str | None = None
    """A dense model to compare with, trained as the full model is."""
    rank: int | None = None
    """Of decomposed experts; None: the width / 24, as 32 is of 768."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Recipe entries that go over those of every row."""
    device: str | None = None
    judged: bool = True
    """Whether quality is measured; otherwise `text` is not needed."""

    def columns(self) -> list[Column]:
        if not self.judged and not self.tasks and self.calibration is not None:
            return [Column("text", self.calibration, self.calibration)]
        if self.text is None and not self.tasks:
            if not self.judged:
                raise MoepressError(
                    "say what to calibrate on: --calibration FILE, or --task NAME (such as sst2@FOLDER)"
                )
            raise MoepressError(
                "say what to measure: --text FILE with --calibration FILE, or --task NAME (such as sst2@FOLDER)"
            )
        found = []
        if self.text is not None:
            if self.calibration is None:
                raise MoepressError("text is judged by --text, and calibrated on --calibration: give both")
            found.append(Column("text", self.calibration, self.text))
        elif self.calibration is not None:
            raise MoepressError("a task is calibrated on its own training split: --calibration goes with --text")
        if self.scoring is not None and not self.tasks:
            raise MoepressError("scoring is about tasks: text has none")
        for task in self.tasks:
            name = task.partition("@")[0]
            if any(column.name == name for column in found):
                raise MoepressError(f"task {name!r} is given twice")
            found.append(Column(name, f"task:{task}"))
        return found

    def recipe(self, given: Mapping[str, Any], column: Column, seed: int, keep: int | float, width: int = 0) -> Recipe:
        """`width` is that of the model, which ranks depend on."""
        method = METHODS.get(str(given["method"]))
        entries = {
            **given,
            **({"keep": keep} if method.fewer else {}),
            **({"decompose.rank": self.rank or max(1, width // 24)} if "decompose.rank" in method.uses else {}),
            "seed": seed,
            "calibration.samples": self.samples,
            "calibration.length": self.length,
            "calibration.batch_size": self.batch_size,
            **self.changes,
        }
        return prepare_recipe(None, column.calibration, entries)

    def command(self) -> str:
        plain = Asked(self.table, self.model)
        words = [f"moepress paper {self.table} --model {self.model}"]
        words += [f"--task {task}" for task in self.tasks]
        spoken = ("table", "model", "tasks", "changes", "judged")
        for name in (own.name for own in fields(self) if own.name not in spoken):
            if getattr(self, name) != getattr(plain, name):
                words.append(f"--{name.replace('_', '-')} {getattr(self, name)}")
        words += [f"--set {key}={value}" for key, value in self.changes.items()]
        return " ".join(words)
