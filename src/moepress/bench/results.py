"""Results of a benchmark as files: everything in JSON, tables in Markdown, a picture."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepress.errors import MoepressError


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""

    def markdown(self) -> str:
        line = lambda cells: "| " + " | ".join(cells) + " |"  # noqa: E731
        align = ["---", *["---:"] * (len(self.columns) - 1)]
        parts = [f"## {self.title}", "", line(self.columns), line(align), *map(line, self.rows)]
        return "\n".join([*parts, *(["", self.note] if self.note else [])])


def write(
    folder: Path, name: str, data: dict[str, Any], title: str, tables: Sequence[Table], draw: Callable[[Path], object]
) -> list[Path]:
    """NAME.json, NAME.md and, with matplotlib, NAME.png. `data` says with which `command` it was made, and on which
    `machine`."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = ["json", "md", "png"] if importlib.util.find_spec("matplotlib") else ["json", "md"]
    files = [folder / f"{name}.{kind}" for kind in kinds]
    files[0].write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    head = [f"# {title}", "", f"`{data['command']}`", "", data["machine"]["words"] + "."]
    body = [part for table in tables for part in ("", table.markdown())]
    picture = ["", f"![{title}]({name}.png)"] if "png" in kinds else []
    files[1].write_text("\n".join([*head, *body, *picture, ""]), encoding="utf-8")
    if picture:
        draw(files[2])
    return files


def continued(folder: Path, name: str, fresh: dict[str, Any], may_grow: Sequence[str]) -> dict[str, Any]:
    """`fresh`, with the rows of an earlier, interrupted run of the same `settings` if NAME.json holds one. Settings
    that `may_grow` only say which rows there are."""
    fresh = json.loads(json.dumps(fresh))
    file = folder / f"{name}.json"
    if not file.is_file():
        return fresh
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        known, rows = dict(found["settings"]), dict(found["rows"])
    except (ValueError, KeyError, TypeError):
        raise MoepressError(f"{file} is nothing that could be continued: give another folder") from None
    if known | {key: fresh["settings"][key] for key in may_grow} != fresh["settings"]:
        raise MoepressError(f"{file} was made under other conditions: give another folder")
    return fresh | {"rows": rows}


def save(folder: Path, name: str, data: dict[str, Any]) -> None:
    """What has been measured so far, for `continued`; never half-written."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{name}.json"
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, folder / f"{name}.json")
