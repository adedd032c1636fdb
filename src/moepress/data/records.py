"""Records of text files, one at a time, each with the words that say where it stands."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from moepress.errors import MoepressError
from moepress.registry import did_you_mean

Record = dict[str, Any]
FORMATS = (".jsonl", ".json", ".txt")
PACKINGS = (".gz", ".xz")


def read_records(path: str | Path) -> Iterator[tuple[str, Record]]:
    """(where, record) of a .jsonl, .json or .txt file, plain or packed with gzip or xz.

    A .json file holds one list of records; a .txt file is one record, its text.
    """
    path = Path(path)
    form = _format(path)
    count = 0
    try:
        with _open(path) as file:
            for where, record in _lines(path, file) if form == ".jsonl" else _whole(path, file, form):
                if not isinstance(record, dict):
                    raise MoepressError(f"{where}: expected an object with fields, found {type(record).__name__}")
                count += 1
                yield where, record
    except UnicodeDecodeError as error:
        raise MoepressError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise MoepressError(f"{path} is damaged or not packed as its name says: {error}") from None
    if not count:
        raise MoepressError(f"{path} is empty: it holds no records")


def _format(path: Path) -> str:
    if path.is_dir():
        raise MoepressError(f"{path} is a folder; name a file in it ({', '.join(FORMATS)}, also .gz or .xz)")
    if not path.exists():
        names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, names) if names else "its folder does not exist either"
        raise MoepressError(f"there is no file {path}: {_shortened(hint)}")
    suffixes = [suffix for suffix in path.suffixes if suffix not in PACKINGS]
    if not suffixes or suffixes[-1] not in FORMATS:
        raise MoepressError(f"{path}: text is read from {', '.join(FORMATS)} files, also packed as .gz or .xz")
    return suffixes[-1]


def _shortened(hint: str, limit: int = 200) -> str:
    return hint if len(hint) <= limit else hint[:limit] + " …"


def _open(path: Path) -> IO[str]:
    try:
        if path.suffix == ".gz":
            return gzip.open(path, "rt", encoding="utf-8")
        if path.suffix == ".xz":
            return lzma.open(path, "rt", encoding="utf-8")
        return open(path, encoding="utf-8")
    except OSError as error:
        raise MoepressError(f"{path} cannot be read: {error.strerror}") from None


def _lines(path: Path, file: IO[str]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield f"{path}, line {number}", _parse(line, f"{path}, line {number}")


def _whole(path: Path, file: IO[str], form: str) -> Iterator[tuple[str, Any]]:
    text = file.read()
    if not text.strip():
        return
    if form == ".txt":
        yield str(path), {"text": text}
        return
    records = _parse(text, str(path))
    if not isinstance(records, list):
        raise MoepressError(f"{path}: a .json file must hold one list of records; one record a line is .jsonl")
    for number, record in enumerate(records, 1):
        yield f"{path}, record {number}", record


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise MoepressError(f"{where} is not JSON: {error.msg} at {place}") from None


def missing_field(where: str, field: str, record: Record) -> MoepressError:
    """The error for a record without a field: where it stands, what was found, what was probably meant."""
    hint = did_you_mean(field, list(record))
    return MoepressError(
        f"{where}: there is no field {field!r} (found: {', '.join(record) or 'nothing'})"
        + (f"; {hint}" if hint.startswith("did") else "")
    )
