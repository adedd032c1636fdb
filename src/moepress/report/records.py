"""What was saved beside an output, as plain values."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moepress.errors import MoepressError
from moepress.observe import Statistics
from moepress.plan import Plan

RECORDS = "moepress"
"""The folder in a compact output. A vanilla one has OUT.moepress beside it."""
SUMMARY, EVALUATION, SIMILARITY = "report.json", "evaluation.json", "similarity.safetensors"
FIGURES, PAGE = "figures", "report.html"


@dataclass
class Records:
    folder: Path
    summary: dict[str, Any]
    recipe: str
    """YAML."""
    plan: Plan
    usage: dict[str, np.ndarray] = field(default_factory=dict)
    """By layer, how often each expert was chosen (E,)."""
    similarity: dict[str, np.ndarray] = field(default_factory=dict)
    """By layer (E, E)."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [layer.name for layer in self.plan.layers]

    @property
    def short(self) -> dict[str, str]:
        return dict(zip(self.names, short_names(self.names), strict=True))


def records_beside(out: str | os.PathLike[str]) -> Path:
    """Where the records of a vanilla output go: nothing of moepress is in the folder itself."""
    out = Path(out)
    return out.with_name(f"{out.name}.{RECORDS}")


def has_records(out: str | os.PathLike[str]) -> bool:
    return _found(out) is not None


def records_of(out: str | os.PathLike[str]) -> Path:
    """The folder of records of an output, or that folder itself."""
    if found := _found(out):
        return found
    raise MoepressError(
        f"there are no records of a compression at {out}: neither {Path(out, RECORDS, SUMMARY)} "
        f"nor {records_beside(out) / SUMMARY}"
    )


def _found(out: str | os.PathLike[str]) -> Path | None:
    places = (Path(out, RECORDS), records_beside(out), Path(out))
    return next((place for place in places if (place / SUMMARY).is_file()), None)


def clear(folder: Path) -> None:
    """Remove what an earlier output of the same name left and a new one need not write."""
    for name in (EVALUATION, SIMILARITY, PAGE):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / FIGURES, ignore_errors=True)


def read_records(folder: Path) -> Records:
    records = Records(
        folder, _json(folder / SUMMARY), (folder / "recipe.yaml").read_text(), Plan.load(folder / "plan.json")
    )
    if (folder / "statistics.json").is_file():
        statistics = Statistics.load(folder / "statistics")
        records.usage = {
            name: gathered["usage"].sums["count"].numpy()
            for name, gathered in statistics.layers.items()
            if "usage" in gathered
        }
    if (folder / SIMILARITY).is_file():
        from safetensors.numpy import load_file

        records.similarity = load_file(folder / SIMILARITY)
    if (folder / EVALUATION).is_file():
        records.evaluations = _json(folder / EVALUATION)
    return records


def add_evaluation(folder: Path, asked: dict[str, Any], score: dict[str, Any]) -> None:
    """Save what an evaluation found; an earlier one of the same text or task is replaced."""
    file = folder / EVALUATION
    known = _json(file) if file.is_file() else []
    asked = {name: value if isinstance(value, (int, float)) else str(value) for name, value in asked.items()}
    kept = [entry for entry in known if entry["asked"] != asked]
    partial = file.with_name(f".{file.name}")
    partial.write_text(json.dumps([*kept, {"asked": asked, "score": score}], indent=1) + "\n", encoding="utf-8")
    os.replace(partial, file)


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MoepressError(f"{file} cannot be read: {error}") from None


def short_names(names: list[str]) -> list[str]:
    """What tells layers apart: `model.layers.3.mlp` among its like is 3, `encoder.block.1.layer.1.mlp` encoder.1.1."""
    if not names:
        return []
    parts = [name.split(".") for name in names]
    common = {word for word in parts[0] if not word.isdigit() and all(word in other for other in parts)}
    short = [".".join(word for word in other if word not in common) for other in parts]
    return short if len(set(short)) == len(names) and all(short) else names
