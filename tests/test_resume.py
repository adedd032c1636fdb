"""A compression that is killed goes on where it was, and ends with the same files."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import moepress
from moepress import api, pipeline
from moepress.checkpoint import shards
from moepress.checkpoint.manifest import CARD
from moepress.errors import MoepressError

from .squeeze import build, silent  # noqa: F401
from .test_streaming import windows

REPORTS = ("moepress/report.", "moepress/figures/time.", "README.md")
"""How long it took is not the same twice; and the model card has the folder's name."""
METHODS: dict[str, dict[str, Any]] = {
    "m-smoe": {"method": "m-smoe"},
    "refit": {"method": "prune-refit"},
    "vanilla": {"method": "reap", "format": "vanilla"},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    build("qwen3_moe").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    windows(tmp_path)
    return tmp_path / "model"


def options(tmp_path: Path, method: str, **more: Any) -> dict[str, Any]:
    text = str(tmp_path / "text.safetensors")
    return {"keep": 0.5, "calibration": text, "calibration.batch_size": 2, **METHODS[method], **more}


def different(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    """Names of files; what is in them would take pytest minutes to print."""
    return sorted(name for name in one | other if one.get(name) != other.get(name))


def files_of(folder: Path) -> dict[str, bytes]:
    names = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    files = {name: (folder / name).read_bytes() for name in sorted(names) if not name.startswith(REPORTS)}
    own = re.compile(
        rb'(?<=[ "])%s(?=["\s])' % re.escape(folder.name.encode())
    )  # the card says what the output is called
    return {name: own.sub(b"OUT", content) if name == CARD else content for name, content in files.items()}


CLEAN = multiprocessing.get_context("forkserver")
"""Children of a process that has calculated nothing: threads that one has begun do not survive a fork."""
CLEAN.set_forkserver_preload(["tests.test_resume", "moepress.api", "transformers.modeling_utils"])


def killed(after: float | None = None, call: int | None = None, **work: Any) -> bool:
    """Compress in a child that is killed after some seconds, or at so many changes of files; whether it was."""
    child = CLEAN.Process(target=compress_until, args=(call, work))
    child.start()
    child.join(after)
    child.kill()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL), "the child failed by itself"
    return child.exitcode != 0


def compress_until(call: int | None, work: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    # The page is drawn once the output is complete, and takes ten times as long as all else here.
    api.draw_report = lambda records: records / "report.html"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if call is not None:
        die_at(call)
    moepress.compress(**work)


def die_at(call: int) -> None:
    left = [call]

    def counted(function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return run

    for name in ("replace", "write", "fsync", "link", "mkdir", "rmdir", "unlink"):
        setattr(os, name, counted(getattr(os, name)))


def survive(tmp_path: Path, model: Path, method: str, kills: int, seed: int) -> None:
    given = options(tmp_path, method)
    assert not killed(model=model, out=tmp_path / "beforehand", **given)  # what is loaded once is loaded
    start = time.perf_counter()
    assert not killed(model=model, out=tmp_path / "undisturbed", **given)
    took = time.perf_counter() - start
    expected = files_of(tmp_path / "undisturbed")
    draw = random.Random(seed)
    done, resumed = 0, 0
    for attempt in itertools.count():
        if done >= kills:
            break
        out = tmp_path / f"out-{attempt}"
        while not (out / "config.json").exists():
            work = {"model": model, "out": out, "resume": True, **given}
            if done >= kills:
                assert not killed(**work)
                break
            by_call = draw.random() < 0.6
            hit = killed(call=draw.randrange(60), **work) if by_call else killed(after=draw.uniform(0.1, took), **work)
            done += hit
            resumed += hit and any(tmp_path.glob(f".{out.name}.partial-*/journal/*-0*.json"))
        assert different(files_of(out), expected) == []
        assert moepress.verify(out).whole
    assert resumed


@pytest.mark.parametrize("method", ["refit"])
def test_three_kills(method: str, model: Path, tmp_path: Path) -> None:
    survive(tmp_path, model, method, kills=3, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("method", list(METHODS))
def test_twenty_kills(method: str, model: Path, tmp_path: Path) -> None:
    survive(tmp_path, model, method, kills=20, seed=2)


class Interrupted(BaseException):
    pass


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException) -> None:
    """Let writing fail after so many layers."""
    write, left = shards.write_file, [after]

    def failing(path: Path, items: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return write(path, items)

    monkeypatch.setattr("moepress.checkpoint.job.write_file", failing)


@pytest.mark.parametrize("method", ["m-smoe", "refit"])
def test_finished_layers_are_not_done_again(
    method: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = options(tmp_path, method)
    with monkeypatch.context() as patch:
        interrupt(patch, 1, Interrupted())
        with pytest.raises(Interrupted):
            moepress.compress(model, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()
    done: list[str] = []
    rebuild = pipeline.rebuild

    def rebuilding(layer: Any, *args: Any) -> Any:
        done.append(layer.name)
        return rebuild(layer, *args)

    monkeypatch.setattr(pipeline, "rebuild", rebuilding)
    if method == "m-smoe":  # all layers have been observed
        monkeypatch.setattr(pipeline, "walk", None)
    moepress.compress(model, tmp_path / "out", resume=True, **given)
    assert done == ["model.layers.2.mlp"]


def test_another_order_is_not_resumed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = options(tmp_path, "m-smoe")
    with monkeypatch.context() as patch:
        interrupt(patch, 1, Interrupted())
        with pytest.raises(Interrupted):
            moepress.compress(model, tmp_path / "out", **given)
    with pytest.raises(MoepressError, match="interrupted run has left finished work"):
        moepress.compress(model, tmp_path / "out", **given)
    with pytest.raises(MoepressError, match="the interrupted run had another recipe"):
        moepress.compress(model, tmp_path / "out", resume=True, **given | {"keep": 0.25})
    part = next(tmp_path.glob(".out.partial-*/parts/00000-000.safetensors"))
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(MoepressError, match="is damaged: start anew"):
        moepress.compress(model, tmp_path / "out", resume=True, **given)
    moepress.compress(model, tmp_path / "out", overwrite=True, **given)
    assert not list(tmp_path.glob(".out.*"))
    with pytest.raises(MoepressError, match="nothing is left to do"):
        moepress.compress(model, tmp_path / "out", resume=True, **given)


def test_a_full_disk_is_one_sentence_and_what_is_finished_stays(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = options(tmp_path, "m-smoe")
    before = files_of(model)
    for after, words in ((0, "go on with --resume"), (1, "go on with --resume")):
        with monkeypatch.context() as patch:
            interrupt(patch, after, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            with pytest.raises(MoepressError, match=words):
                moepress.compress(model, tmp_path / "out", resume=True, **given)
        assert not (tmp_path / "out").exists()
    moepress.compress(model, tmp_path / "out", resume=True, **given)
    moepress.compress(model, tmp_path / "undisturbed", **given)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "undisturbed")
    assert files_of(model) == before


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a disk that is full: the system itself refuses to write more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("size", [100, 5_000, 30_000])
def test_files_that_cannot_be_written_leave_no_half_of_anything(
    method: str, size: int, model: Path, tmp_path: Path
) -> None:
    given, before = options(tmp_path, method), files_of(model)
    with files_of_at_most(size), pytest.raises(MoepressError, match=r"cannot be written here; (finished|nothing)"):
        moepress.compress(model, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists() and files_of(model) == before
    moepress.compress(model, tmp_path / "out", resume=True, **given)
    assert moepress.verify(tmp_path / "out").whole
    moepress.compress(model, tmp_path / "undisturbed", **given)
    assert different(files_of(tmp_path / "out"), files_of(tmp_path / "undisturbed")) == []


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_read_error_on_the_way_is_one_sentence_and_can_be_resumed(
    share: float, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, read, calls = options(tmp_path, "refit"), os.preadv, [0]

    def failing(*args: Any) -> int:
        calls[0] += 1
        if calls[0] > most:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*args)

    most: float = float("inf")
    monkeypatch.setattr(os, "preadv", failing)
    moepress.compress(model, tmp_path / "undisturbed", **given)
    most, calls[0] = int(share * calls[0]), 0
    with pytest.raises(MoepressError, match="cannot be read: Input/output error"):
        moepress.compress(model, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()
    most = float("inf")
    moepress.compress(model, tmp_path / "out", resume=True, **given)
    assert different(files_of(tmp_path / "out"), files_of(tmp_path / "undisturbed")) == []


def test_a_manifest_finds_what_was_changed(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    moepress.compress(model, out, **options(tmp_path, "m-smoe"))
    assert moepress.verify(out).whole
    (out / "mine.txt").write_text("")
    found = moepress.verify(out)
    assert found.whole and found.extra == ["mine.txt"]
    weights = out / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    (out / "config.json").unlink()
    assert moepress.verify(out).wrong == {"model.safetensors": "was changed", "config.json": "is missing"}
    weights.write_bytes(data[:-1])
    assert "bytes" in moepress.verify(out).wrong["model.safetensors"]
    manifest = out / "moepress" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"]["../model/config.json"] = {"size": 1, "sha256": ""}
    manifest.write_text(json.dumps(content))
    with pytest.raises(MoepressError, match="not a file of the output"):
        moepress.verify(out)
    manifest.unlink()
    with pytest.raises(MoepressError, match="no manifest"):
        moepress.verify(out)
