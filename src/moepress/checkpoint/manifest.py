"""The manifest: size and checksum of every file of an output, so that a copy can be checked."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepress.checkpoint.files import inside
from moepress.checkpoint.folder import read_json
from moepress.errors import MoepressError

NAME = "manifest.json"
RECORDS = "moepress"
CARD = "README.md"
"""Of the output: it is for people, who may change it, and `evaluate` adds to it. No checksum is taken."""
FORMAT_VERSION = 1


def write_manifest(folder: Path, place: Path, known: dict[str, dict[str, Any]] | None = None) -> None:
    """Of all files of `folder`, into the folder `place`: that of the records, which may change later and are left out,
    as the card is.
    `known`: entries by name of files whose checksums were computed while they were written."""
    known = known or {}
    entries = {}
    for path in sorted(file for file in folder.rglob("*") if file.is_file()):
        name = path.relative_to(folder).as_posix()
        if name == CARD or name.startswith(f"{RECORDS}/"):
            continue
        entry = known.get(name) or {"size": path.stat().st_size, "sha256": checksum(path)}
        entries[name] = {"size": entry["size"], "sha256": entry["sha256"]}
    content = {"format_version": FORMAT_VERSION, "files": entries}
    (place / NAME).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def checksum(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@dataclass(frozen=True)
class Verified:
    files: int
    bytes: int
    wrong: dict[str, str]
    """Name of a file -> what is wrong with it."""
    extra: list[str]
    """Files that the manifest does not know, which is no error."""

    @property
    def whole(self) -> bool:
        return not self.wrong


def manifest_of(folder: Path) -> Path:
    """In the folder itself, or beside a vanilla one."""
    places = (folder / RECORDS / NAME, folder.with_name(f"{folder.name}.{RECORDS}") / NAME)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise MoepressError(f"{folder} has no manifest: it was not written by moepress, or by an older version")
    return found


def verify(folder: str | os.PathLike[str]) -> Verified:
    """Compare every file of an output with its manifest."""
    path = Path(os.path.realpath(folder))
    if not path.is_dir():
        raise MoepressError(f"{folder} is not a folder")
    place = manifest_of(path)
    content = read_json(place)
    files = content.get("files")
    if content.get("format_version") != FORMAT_VERSION or not isinstance(files, dict):
        raise MoepressError(f"{place} is damaged, or of a newer version of moepress")
    wrong = {}
    total = 0
    for name, entry in files.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("size"), int):
            raise MoepressError(f"{place} is damaged: its entry for {name!r} makes no sense")
        parent, _, leaf = name.rpartition("/")
        if parent not in ("", "additional_chat_templates"):
            raise MoepressError(f"{place} is damaged: {name!r} is not a file of the output")
        file = inside(path / parent, leaf)
        if not file.is_file():
            wrong[name] = "is missing"
        elif file.stat().st_size != entry["size"]:
            wrong[name] = f"has {file.stat().st_size} bytes and should have {entry['size']}"
        elif checksum(file) != entry.get("sha256"):
            wrong[name] = "was changed"
        total += entry["size"]
    names = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    return Verified(
        len(files),
        total,
        wrong,
        sorted(name for name in names if name not in files and name != CARD and not name.startswith(f"{RECORDS}/")),
    )
