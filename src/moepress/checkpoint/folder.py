"""Output folders that are never half-written, and input folders that are checked before anything is computed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moepress.checkpoint.files import checked_link, inside
from moepress.checkpoint.headers import Header, read_header
from moepress.errors import MoepressError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FOLDERS = ("additional_chat_templates",)
"""Inside of a checkpoint's own that are copied along."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""EFBIG: a file is larger than the file system, or a limit of the process, allows."""
AnyPath = str | os.PathLike[str]


# ---- writing ---------------------------------------------------------------------------------------------------------


@contextmanager
def output_folder(path: AnyPath, overwrite: bool = False, source: AnyPath | None = None) -> Iterator[Path]:
    """Write a folder as a whole or not at all.

    Yields a hidden folder beside `path` that takes its name when everything has been written; on any error it is
    removed. With `overwrite`, the old folder is in place until the new one is complete. `source` is the folder that
    is being read.
    """
    target = Path(os.path.realpath(path))
    refuse_output(target, overwrite, source)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target)
        partial = Path(
            tempfile.mkdtemp(prefix=f"{_marker(target)}{socket.gethostname()}-{os.getpid()}-", dir=target.parent)
        )
    except OSError as error:
        raise _explained(error, target) from error
    try:
        os.chmod(partial, 0o777 & ~_umask())  # mkdtemp makes it private
        yield partial
        _flush(partial)
        _take_place(partial, target)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if is_disk_full(error):
            raise _explained(error, target) from error
        raise


@contextmanager
def job_folder(
    path: AnyPath, overwrite: bool = False, source: AnyPath | None = None, resume: bool = False
) -> Iterator[Path]:
    """A hidden folder beside `path` in which a long job works, and whose sub-folder `out` takes the name when the job
    is done. Unlike that of `output_folder`, it stays if the job is interrupted after it has finished something, and
    `resume` goes on in it."""
    target = Path(os.path.realpath(path))
    if resume and not overwrite and is_full(target) and not any(map(_has_finished, _left_behind(target))):
        raise MoepressError(
            f"{target} is there, and no interrupted run of it: nothing is left to do (`moepress verify` checks an "
            "output, `moepress report` draws its page again)"
        )
    refuse_output(target, overwrite, source)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        left = [folder for folder in _left_behind(target) if _has_finished(folder)]
        if left and not resume and not overwrite:
            raise MoepressError(
                f"an interrupted run has left finished work for {target}: go on with --resume (resume=True), or start "
                "anew with --overwrite (overwrite=True)"
            )
        own = target.parent / f"{_marker(target)}{socket.gethostname()}-{os.getpid()}-job"
        going_on = max(left, key=lambda folder: folder.stat().st_mtime) if resume and left else None
        _remove_stale(target, going_on)
        if going_on is not None:
            os.replace(going_on, own)
        own.mkdir(exist_ok=True)
        os.chmod(own, 0o777 & ~_umask())
    except OSError as error:
        raise _explained(error, target) from error
    try:
        yield own
        _flush(own / "out")
        _take_place(own / "out", target)
    except BaseException as error:
        kept = _has_finished(own)
        if is_disk_full(error):
            raise _explained(error, target, kept) from error
        if not kept:
            shutil.rmtree(own, ignore_errors=True)
        raise
    shutil.rmtree(own, ignore_errors=True)


def _has_finished(folder: Path) -> bool:
    return any((folder / "journal").glob("*-[0-9]*.json"))


def refuse_output(path: AnyPath, overwrite: bool = False, source: AnyPath | None = None) -> None:
    """Raise if `output_folder` would; to be asked before hours are spent on what goes there."""
    target = Path(os.path.realpath(path))
    if source is not None and Path(source).is_dir():
        origin = Path(os.path.realpath(source))
        if target == origin or origin in target.parents:
            raise MoepressError(f"the output {target} is the input folder or inside of it: choose another folder")
        if target in origin.parents:
            raise MoepressError(f"the output {target} contains the input folder {origin}: choose another folder")
    if target.exists() and not target.is_dir():
        raise MoepressError(f"the output {target} is a file: choose a folder")
    if is_full(target) and not overwrite:
        raise MoepressError(
            f"the output folder {target} is not empty: choose another one, or say --overwrite (overwrite=True)"
        )


def is_full(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def is_disk_full(error: BaseException) -> bool:
    """safetensors, tokenizers and torch raise exceptions of their own, with the system's error in the text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in DISK_FULL
    text = str(error)
    return any(f"os error {code}" in text or os.strerror(code) in text for code in DISK_FULL)


def _explained(error: BaseException, target: Path, kept: bool = False) -> MoepressError:
    if is_disk_full(error):
        place = next(folder for folder in (target, *target.parents) if folder.exists())
        free = shutil.disk_usage(place).free
        what = "finished layers are kept, go on with --resume" if kept else "nothing was written"
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            return MoepressError(f"{target}: files as large as the output's cannot be written here; {what}")
        return MoepressError(f"the disk is full: only {free / 1e9:.1f} GB are left for {target}; {what}")
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return MoepressError(f"the output folder {target} cannot be made: {reason}")


def _marker(target: Path) -> str:
    return f".{target.name}.partial-"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _remove_stale(target: Path, spared: Path | None = None) -> None:
    """Remove what runs that were killed have left; a run that is alive keeps its folder."""
    for folder in _left_behind(target):
        if folder != spared:
            shutil.rmtree(folder, ignore_errors=True)
    old = _aside(target)
    if old.exists():  # a run died between the two renames, or before it could remove the old folder
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(old, target)


def _left_behind(target: Path) -> list[Path]:
    """The working folders of runs that are not alive any more."""
    found = []
    for folder in target.parent.glob(f"{_glob_escape(_marker(target))}*"):
        host, _, rest = folder.name.removeprefix(_marker(target)).rpartition("-")[0].rpartition("-")
        if host == socket.gethostname() and rest.isdigit() and not _is_alive(int(rest)):
            found.append(folder)
    return found


def _glob_escape(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)


def _is_alive(process: int) -> bool:
    if process == os.getpid():
        return False  # not this very run: its folder is yet to be made
    if os.name == "nt":
        return True  # signal 0 would end the process there
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _flush(folder: Path) -> None:
    """Have everything on the disk before the folder gets its name: a crash of the machine must not leave holes."""
    mask = _umask()
    for root, _, files in os.walk(folder):
        for name in files:
            with open(os.path.join(root, name), "rb") as stream:
                os.fsync(stream.fileno())
            os.chmod(os.path.join(root, name), 0o666 & ~mask)  # safetensors makes its files private
        _flush_names(Path(root))


def _flush_names(folder: Path) -> None:
    with suppress(OSError):  # not every system lets a folder be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _take_place(partial: Path, target: Path) -> None:
    old = _aside(target)
    if target.exists():
        os.replace(target, old)
    try:
        os.replace(partial, target)
    except BaseException:
        if old.exists():
            os.replace(old, target)
        raise
    _flush_names(target.parent)
    shutil.rmtree(old, ignore_errors=True)


# ---- reading ---------------------------------------------------------------------------------------------------------


def check_checkpoint(folder: AnyPath) -> Header:
    """Refuse what is not a whole checkpoint in safetensors, with one sentence; returns the header of all its files."""
    path = Path(folder)
    if not path.exists():
        raise MoepressError(f"{path} does not exist")
    if not path.is_dir():
        raise MoepressError(f"{path} is a file: give the folder of the checkpoint")
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise MoepressError(f"{path} holds a PEFT adapter only: merge it into its base model first")
        raise MoepressError(f"{path} is not a model: it has no config.json")
    for entry in path.iterdir():
        checked_link(path, entry)
        for inner in entry.iterdir() if entry.is_dir() and entry.name in FOLDERS else ():
            checked_link(path, inner)
    read_json(path / "config.json")
    if (path / SINGLE).is_file():  # transformers, too, looks for it first
        return read_header(path / SINGLE)
    if (path / INDEX).is_file():
        return _check_shards(path)
    if any(entry.name.endswith(PICKLES) for entry in path.iterdir()):
        raise MoepressError(
            f"{path} holds pickled weights only, which can run code when they are loaded: convert it to safetensors"
        )
    raise MoepressError(f"{path} holds no weights: there is neither {SINGLE} nor {INDEX}")


def _check_shards(path: Path) -> Header:
    places = read_json(path / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise MoepressError(f"{path / INDEX} is damaged: it has no weight_map")
    if odd := [name for name, shard in places.items() if not isinstance(shard, str)]:
        raise MoepressError(f"{path / INDEX} is damaged: it does not name a file for {odd[0]}")
    shards = sorted(set(places.values()))
    for shard in shards:
        inside(path, shard)
        if not shard.endswith(".safetensors"):
            raise MoepressError(f"{path / INDEX} names {shard!r}, which is not a safetensors file")
    if absent := [shard for shard in shards if not (path / shard).is_file()]:
        raise MoepressError(
            f"{path} is incomplete: {len(absent)} of {len(shards)} shards are missing, {absent[0]} first"
        )
    merged: Header = {}
    for shard in shards:
        header = read_header(path / shard)
        if lost := [name for name, place in places.items() if place == shard and name not in header]:
            raise MoepressError(f"{path} is inconsistent: {shard} does not hold {lost[0]}, which {INDEX} places there")
        merged |= header
    return merged


def read_json(path: Path) -> dict:
    """A JSON file that holds an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise MoepressError(f"{path} is damaged: it is not valid JSON")
    return content
