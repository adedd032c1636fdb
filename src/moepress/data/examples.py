"""The examples of labelled tasks, from a local folder or the Hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from moepress.data.hub import open_hub
from moepress.data.records import Record, missing_field, read_records
from moepress.errors import MoepressError
from moepress.tasks import TASKS, Example, Task

FOLDER_VARIABLE = "MOEPRESS_TASKS"
SUFFIXES = (".jsonl.gz", ".jsonl", ".jsonl.xz", ".json")


def task_examples(
    task: str | Task, split: str = "validation", folder: str | Path | None = None, limit: int | None = None
) -> tuple[Task, list[Example]]:
    """A task and the examples of one split.

    They are read from `folder`, else from the folder of this task under $MOEPRESS_TASKS, else from the Hub.
    """
    task = TASKS.create(task) if isinstance(task, str) else task
    examples: list[Example] = []
    for where, record in _records(task, split, folder):
        if limit is not None and len(examples) >= limit:
            break
        try:
            if (absent := task.missing(record)) is not None:
                raise missing_field(where, absent, record)
            examples += task.examples(record)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise MoepressError(f"{where}: {reason}") from None
    return task, examples[:limit]


def _records(task: Task, split: str, folder: str | Path | None) -> Iterator[tuple[str, Record]]:
    root = folder or os.environ.get(FOLDER_VARIABLE)
    if root is None:
        yield from _hub_records(task, split)
        return
    if not Path(root).is_dir():
        raise MoepressError(f"there is no folder {root} with data of task {task.name!r}")
    places = [Path(root) / task.name, Path(root)] if folder else [Path(root) / task.name]
    files = [place / f"{split}{suffix}" for place in places for suffix in SUFFIXES]
    found = next((file for file in files if file.exists()), None)
    if found is None:
        raise MoepressError(f"{places[0]} has no {split}.jsonl or {split}.jsonl.gz for task {task.name!r}")
    yield from read_records(found)


def _hub_records(task: Task, split: str) -> Iterator[tuple[str, Record]]:
    dataset, config = task.hub
    try:
        rows = open_hub(dataset, config, split)
    except MoepressError as error:
        raise MoepressError(
            f"{error}: for task {task.name!r} set {FOLDER_VARIABLE} to a folder with {task.name}/{split}.jsonl, "
            f"or write task:{task.name}@folder"
        ) from None
    for number, row in enumerate(rows, 1):
        yield f"hub:{dataset} ({split}), row {number}", dict(row)
