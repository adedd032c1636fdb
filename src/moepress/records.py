"""What is saved beside an output: how it was made, what was measured, the report, the card."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from moepress.checkpoint.hub import hub_name
from moepress.checkpoint.load import load_skeleton, local_folder
from moepress.checkpoint.manifest import write_manifest
from moepress.checkpoint.sizes import sizes_of
from moepress.errors import MoepressError
from moepress.pipeline import Outcome
from moepress.report import RECORDS, SIMILARITY, add_evaluation, clear, draw_report, records_beside, records_of
from moepress.report.card import TRAINING, update_card, write_card
from moepress.report.records import EVALUATION, FIGURES, PAGE, SUMMARY

AnyPath = str | os.PathLike[str]


def write_records(
    outcome: Outcome,
    summary: dict[str, Any],
    checkpoint: Path,
    folder: Path,
    known: dict[str, dict[str, Any]] | None = None,
    *,
    title: str,
    source: AnyPath | None = None,
) -> None:
    """Everything that made the output, so that any stage can be run again alone, its card, and the checksums of its
    files. `source`: the folder or Hub name that it was made of; `title`: the output's name."""
    folder.mkdir(parents=True, exist_ok=True)
    clear(folder)
    outcome.recipe.save(folder / "recipe.yaml")
    outcome.plan.save(folder / "plan.json")
    if outcome.statistics.layers:
        outcome.statistics.save(folder / "statistics")
    if outcome.similarity:
        save_file({name: matrix.contiguous() for name, matrix in outcome.similarity.items()}, folder / SIMILARITY)
    if outcome.stable_ranks:
        (folder / "stable_rank.json").write_text(json.dumps(outcome.stable_ranks, indent=1) + "\n")
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
    write_card(checkpoint, folder, title, source_folder(source), summary["base_model"])
    write_manifest(checkpoint, folder, known)


def write_training(
    folder: Path, records: Path, made: list[dict[str, Any]], *, title: str, source: AnyPath | None, before: Path | None
) -> None:
    """The records `before` training, but for what was measured then, and what training did; the card, and checksums."""
    if before is not None:
        stale = shutil.ignore_patterns(EVALUATION, FIGURES, PAGE)
        shutil.copytree(before, records, dirs_exist_ok=True, copy_function=shutil.copyfile, ignore=stale)
    records.mkdir(parents=True, exist_ok=True)
    file = records / TRAINING
    earlier = json.loads(file.read_text()) if before is not None and file.exists() else []
    file.write_text(json.dumps([*earlier, *made], indent=1) + "\n")
    write_card(folder, records, title, source_folder(source), None if source is None else hub_name(source))
    write_manifest(folder, records)
    if before is not None and (before / PAGE).exists():
        draw_report(records)


def write_export(
    folder: Path, records: Path, sizes: dict[str, int], duplicated: bool, *, title: str, source: AnyPath
) -> None:
    """The records of a compact checkpoint for its export, which computes the same; its card, and checksums."""
    shutil.rmtree(records, ignore_errors=True)  # of an output that was replaced
    before = records_in(source, compact=True)
    if before is not None:
        shutil.copytree(before, records, copy_function=shutil.copyfile, ignore=shutil.ignore_patterns(FIGURES, PAGE))
        if (file := records / SUMMARY).is_file():  # what was only trained has none
            summary = json.loads(file.read_text()) | {"format": "vanilla", "after": sizes, "duplicated": duplicated}
            file.write_text(json.dumps(summary, indent=1) + "\n")
    records.mkdir(parents=True, exist_ok=True)
    write_card(folder, records, title, source_folder(source), hub_name(source))
    write_manifest(folder, records)
    if before is not None and (before / PAGE).exists():
        draw_report(records)


def source_folder(source: AnyPath | None) -> Path | None:
    return None if source is None else local_folder(source)


def records_in(source: AnyPath | None, compact: bool) -> Path | None:
    """Where `compress` or an earlier recovery has left its records."""
    if source is None:
        return None
    records = local_folder(source) / RECORDS if compact else records_beside(source)
    return records if records.is_dir() else None


def write_report(out: AnyPath, every_layer: bool = False) -> Path:
    """Draw the report of an output again; `every_layer` draws layers too that the page leaves out. Returns the page."""
    return draw_report(records_of(out), every_layer)


def check_original(out: AnyPath, against: AnyPath) -> None:
    """What an output is compared with, for its records, must be as large as what it was made of."""
    file = records_of(out) / SUMMARY
    if not file.is_file():  # what was only trained has none
        return
    summary = json.loads(file.read_text())
    original = load_skeleton(against)
    there, here = sizes_of(original).parameters, summary["before"]["parameters"]
    quantised = getattr(original.config, "quantization_config", None) is not None  # counted with scales, or without
    if there != here and not quantised:
        raise MoepressError(
            f"{against} has {there:,} parameters, and {summary['model'] or 'the model'} that {out} was made of had "
            f"{here:,}: compare with that, or say --no-record"
        )


def record_evaluation(out: AnyPath, score: dict[str, Any], **asked: Any) -> Path:
    """Add what `evaluate` found to the records and the card of an output, and draw its report again; returns the page.
    `asked` says what was evaluated (`text=` or `task=`, `against=`, …); an earlier result of the same is replaced."""
    records = records_of(out)
    add_evaluation(records, asked, score)
    update_card(output_of(records), records)
    return draw_report(records)


def output_of(records: Path) -> Path:
    """The output that records belong to: the folder around them, or beside them."""
    records = Path(os.path.abspath(records))
    return records.parent if records.name == RECORDS else records.with_name(records.name.removesuffix(f".{RECORDS}"))
