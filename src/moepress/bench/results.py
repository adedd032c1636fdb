"""Results of a benchmark as files: everything in JSON, tables in Markdown, a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    folder: Path, name: str, data: dict[str, Any], title: str, tables: Sequence[Table], draw: Callable[[Path], None]
) -> list[Path]:
    """NAME.json, NAME.md and NAME.png. `data` says with which `command` it was made, and on which `machine`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.{kind}" for kind in ("json", "md", "png")]
    files[0].write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    head = [f"# {title}", "", f"`{data['command']}`", "", data["machine"]["words"] + "."]
    body = [part for table in tables for part in ("", table.markdown())]
    files[1].write_text("\n".join([*head, *body, "", f"![{title}]({name}.png)", ""]), encoding="utf-8")
    draw(files[2])
    return files
