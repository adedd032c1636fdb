"""Benchmarks run, and write what they say; how fast things are is no matter for tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moepress.bench.model import Settings, build
from moepress.bench.timing import Clock, Timing, human_seconds, take_turns
from moepress.bench.versions import VERSIONS
from moepress.cli.main import app
from moepress.errors import MoepressError

SMALL = ["--hidden", "70", "--width", "8", "--count", "3", "--reference", "2", "--repeats", "2"]


def test_align_writes_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    families = ["--family", "lognormal", "--family", "upcycled-1"]
    command = ["bench", "align", *SMALL, *families, "--model-problems", "5", "-o", "results", "--json"]
    ran = CliRunner().invoke(app, command, catch_exceptions=False)
    assert ran.exit_code == 0
    data = json.loads(ran.output)
    assert data == json.loads((tmp_path / "results" / "align.json").read_text())
    assert set(data["layer"]) == {"lognormal", "upcycled-1"}
    for family in (*data["layer"].values(), *data["model"].values()):
        assert 0 <= family["worst_gap"] <= 1e-4
    for family in data["layer"].values():
        assert abs(family["worst_against_scipy"]) <= family["worst_gap"] + 1e-12
        assert sum(family["solved"].values()) == 3
        assert len(family["per_problem"]["SciPy"]["seconds"]) == 2
    assert sum(data["model"]["lognormal"]["solved"].values()) == 5
    assert data["command"].endswith("-o results") and "--family lognormal" in data["command"]
    written = (tmp_path / "results" / "align.md").read_text()
    assert data["command"] in written and "A whole model" in written
    assert (tmp_path / "results" / "align.png").stat().st_size > 1000


def test_unknown_experts_and_absent_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MoepressError, match="known are iid"):
        CliRunner().invoke(app, ["bench", "align", *SMALL, "--family", "nonsense"], catch_exceptions=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MoepressError, match="no CUDA device"):
        CliRunner().invoke(app, ["bench", "align", *SMALL, "--device", "cuda"], catch_exceptions=False)


def test_work_takes_turns() -> None:
    done: list[str] = []
    work = {"a": lambda: done.append("a"), "b": lambda: done.append("b")}
    timings = take_turns(Clock.on(torch.device("cpu")), work, repeats=2, warmup=1)
    assert done == ["a", "b"] * 3
    assert [len(timing.seconds) for timing in timings.values()] == [2, 2]


def test_seconds_in_words() -> None:
    assert [human_seconds(s) for s in (2.345, 0.9999, 0.0123, 0.00099999, 4.5e-6)] == [
        "2.35 s",
        "1 s",
        "12.3 ms",
        "1 ms",
        "4.5 µs",
    ]
    assert Timing([3.0, 1.0, 2.0]).words() == "2 s (1 s – 3 s)"


TINY = ["--width", "16", "--hidden", "24", "--experts", "6", "--keep", "2", "--repeats", "2", "--dtype", "float32"]


@pytest.mark.parametrize(
    ("name", "more", "rows"),
    [
        ("layer", ["--tokens", "1", "--tokens", "7", "--rank", "4"], 2 * len(VERSIONS)),
        ("model", "--heads 2 --layers 4 --vocabulary 40 --source 5 --target 3 --rank 4".split(), len(VERSIONS) - 1),
        ("merge", [], 5),
    ],
)
def test_versions_side_by_side(
    name: str, more: list[str], rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compared computes the same, in every version that does."""
    monkeypatch.chdir(tmp_path)
    command = ["bench", name, *TINY, *more, "-o", "results", "--json"]
    ran = CliRunner().invoke(app, command, catch_exceptions=False)
    assert ran.exit_code == 0
    data = json.loads(ran.output)
    assert data == json.loads((tmp_path / "results" / f"{name}.json").read_text())
    assert len(data["rows"]) == rows
    assert all(len(row["seconds"]["seconds"]) == 2 for row in data["rows"])
    compared = [row["apart"] for row in data["rows"] if "apart" in row]
    assert compared and max(compared) <= 1e-5
    assert data["command"].endswith("-o results") and f"moepress bench {name} --width 16" in data["command"]
    assert data["command"] in (tmp_path / "results" / f"{name}.md").read_text()
    assert (tmp_path / "results" / f"{name}.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("layer --only nonsense", "known are dense"),
        ("layer --keep 9 --experts 8", "cannot keep 9"),
        ("layer --dtype int8", "no dtype 'int8'"),
        ("layer --device nowhere", "none that torch knows"),
        ("model --only dense-quick", "no version 'dense-quick'"),
        ("model --heads 5", "heads that divide"),
        ("merge --keep 9 --experts 8", "cannot keep 9"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: str, said: str) -> None:
    with pytest.raises(MoepressError, match=said):
        CliRunner().invoke(app, ["bench", *words.split()], catch_exceptions=False)


def test_benchmarks_on_a_gpu_are_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("layer", "model"):
        with pytest.raises(MoepressError, match="no CUDA device"):
            CliRunner().invoke(app, ["bench", name, "--device", "cuda"], catch_exceptions=False)


def test_a_merged_model_has_the_parameters_that_are_left() -> None:
    """Versions share parameters with the original; each counts its own once."""
    settings = Settings(16, 24, 2, 4, 40, experts=6, keep=2, rank=4, skipped=1, only=("aliased", "m-smoe", "few-rows"))
    models = build(settings, torch.float32, torch.device("cpu"))
    count = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    expert, merged_layers = 2 * 16 * 24, 3
    assert models["native"].lm_head.weight is models["native"].shared.weight
    assert count["native"] - count["m-smoe"] == merged_layers * (6 - 2) * expert
    assert count["aliased"] == count["m-smoe"]
    assert count["m-smoe"] - count["few-rows"] == merged_layers * (6 - 2) * 16
