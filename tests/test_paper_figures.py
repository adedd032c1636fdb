"""The paper's figures: drawn from one compression, and from the main table."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from moepress.cli.main import app
from moepress.errors import MoepressError
from moepress.paper.asked import Asked
from moepress.paper.charts import rank_changes
from moepress.paper.figures import make_figure, make_teaser, pressed, records_of
from moepress.paper.tables.pictures import PICTURES

from . import zoo


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    zoo.build("qwen3_moe").save_pretrained(folder / "model")
    ids = torch.randint(3, 80, (8, 16), generator=torch.Generator().manual_seed(0))
    save_file({"ids": ids}, folder / "text.safetensors")
    return folder


def asked(place: Path, figure: str) -> Asked:
    text = str(place / "text.safetensors")
    return Asked(figure, str(place / "model"), text=text, calibration=text, keep=0.5, rank=4)


@pytest.mark.parametrize("name", PICTURES)
def test_figures_are_drawn_from_what_was_done(place: Path, tmp_path: Path, name: str) -> None:
    data = make_figure(asked(place, name), tmp_path)
    files = {file.name for file in tmp_path.iterdir()}
    assert files == {f"{name}-text.{kind}" for kind in ("png", "svg", "csv")} | {f"{name}.json"}
    assert (tmp_path / f"{name}-text.png").stat().st_size > 2000
    rows = data["columns"]["text"]["rows"]
    assert json.loads((tmp_path / f"{name}.json").read_text())["columns"]["text"]["rows"] == rows
    assert len(list(csv.DictReader((tmp_path / f"{name}-text.csv").open()))) == len(rows)
    done = pressed(asked(place, name), asked(place, name).columns()[0])
    plan = done.outcome.plan
    if name == "usage":
        assert sum(row["chosen"] for row in rows) == 2 * 2 * 8 * 16  # layers, experts a token, tokens
    if name == "grouping":
        assert sum(row["leads"] for row in rows) == sum(layer.physical for layer in plan.layers)
        assert len(rows) == sum(layer.experts for layer in plan.layers)
    if name == "remaining":
        assert all(0 < row["share"] < 1 for row in rows) and len(rows) == sum(layer.physical for layer in plan.layers)
    if name == "stable-rank":
        assert [row["change"] for row in rows] == list(rank_changes(records_of(done)).values())


def test_the_change_of_a_stable_rank_is_that_of_the_dominant_experts(place: Path) -> None:
    done = pressed(asked(place, "stable-rank"), asked(place, "stable-rank").columns()[0])
    changes = rank_changes(records_of(done))
    layer = next(layer for layer in done.outcome.plan.layers if layer.name in changes)
    ranks = done.outcome.stable_ranks[layer.name]

    def mean(when: str, expert: int) -> float:
        return sum(each[expert] for each in ranks[when].values()) / len(ranks[when])

    each = [mean("after", p) / mean("before", g.leader) - 1 for p, g in enumerate(layer.groups)]
    assert changes[layer.name] == pytest.approx(sum(each) / len(each))


def cell(value: float, size: int) -> dict[str, Any]:
    return {"bytes": size, "shown": {"copa accuracy %": value}}


def test_the_teaser_is_drawn_from_the_main_table(tmp_path: Path) -> None:
    with pytest.raises(MoepressError, match="moepress paper main"):
        make_teaser(tmp_path)
    averaging = json.dumps({"method": "averaging"})
    rows = {"copa | seed 0 | full": cell(70, 100), "copa | seed 0 | zeroed": cell(50, 100)}
    rows |= {f"copa | seed {seed} | {averaging}": cell(60 + seed, 40) for seed in (0, 1)}
    (tmp_path / "main.json").write_text(json.dumps({"rows": rows}))
    assert CliRunner().invoke(app, ["paper", "teaser", "-o", str(tmp_path)]).stdout.strip().endswith("teaser-copa.png")
    points = {row["row"]: row for row in csv.DictReader((tmp_path / "teaser-copa.csv").open())}
    assert set(points) == {"full", "averaging", "experts zeroed"}
    assert float(points["averaging"]["value"]) == 60.5 and float(points["full"]["bytes"]) == 100
    with pytest.raises(MoepressError, match="no column 'sst2'"):
        make_teaser(tmp_path, "sst2")


def test_the_command_says_where_the_pictures_are(place: Path, tmp_path: Path) -> None:
    text = str(place / "text.safetensors")
    given = ["--model", str(place / "model"), "--calibration", text, "--keep", "0.5"]
    ran = CliRunner().invoke(app, ["paper", "usage", *given, "-o", str(tmp_path)], catch_exceptions=False)
    assert ran.stdout.split() == [str(tmp_path / "usage-text.png")]
