"""The paper's tables of costs and facts: what is counted is right; how long it takes is no matter for tests."""

from __future__ import annotations

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
from moepress.paper.costs import Running, measure_running
from moepress.paper.facts import hyper_parameters, model_card
from moepress.paper.flops import forward_flops
from moepress.paper.merging_cost import PRINTED, STAGES, measure_merging
from moepress.paper.models import Batch
from moepress.paper.tables.running import RUNNING

from . import zoo


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("costs")
    for name in ("qwen3_moe", "switch_transformers"):
        model = zoo.build(name)
        model.config.decoder_start_token_id = 0
        model.save_pretrained(folder / name)
    ids = torch.randint(3, 80, (8, 16), generator=torch.Generator().manual_seed(0))
    save_file({"ids": ids}, folder / "text.safetensors")
    return folder


def options(place: Path, family: str) -> list[str]:
    return ["--model", str(place / family), "--calibration", str(place / "text.safetensors"), "--keep", "0.5"]


@pytest.mark.parametrize("table", RUNNING)
@pytest.mark.parametrize("family", ["qwen3_moe", "switch_transformers"])
def test_costs_of_running(place: Path, tmp_path: Path, table: str, family: str) -> None:
    given = ["--batch-sizes", "1,2", "--source", "12", "--target", "5", "--repeats", "2"]
    rank = ["--rank", "4"]
    command = ["paper", table, *options(place, family), *given, *rank, "-o", str(tmp_path), "--json"]
    data = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
    assert {row["row"] for row in data["rows"].values()} == set(RUNNING[table].rows)
    assert {row["batch_size"] for row in data["rows"].values()} == {1, 2}
    full, merged = data["rows"]["full | 2"], data["rows"]["m-smoe | 2"]
    assert full["parameters"] == sum(p.numel() for p in zoo.build(family).parameters())
    assert merged["bytes"] < full["bytes"] and len(full["latency"]["seconds"]) == 2
    if family == "qwen3_moe":  # Switch drops tokens
        router, rotary = 2 * 32 * 8 * 24, 2 * 4 * 12  # its map is no module, and the angles are a product
        counted = full["flops"] - forward_flops(zoo.build(family), Batch(2, 12)) - 2 * router
        assert counted in (rotary, 0)  # in newer transformers they are no matrix product
        assert full["flops"] >= merged["flops"] > 0.5 * full["flops"]
    if table == "cost":
        assert data["rows"]["mc-smoe | 2"]["parameters"] < merged["parameters"]
    else:
        assert data["rows"]["m-smoe, pruned router | 2"]["bytes"] < merged["bytes"]
    text = (tmp_path / f"{table}.md").read_text()
    assert RUNNING[table].printed[0][0] in text and "moepress paper" in text
    assert (tmp_path / f"{table}.png").stat().st_size > 1000


def test_costs_of_merging(place: Path, tmp_path: Path) -> None:
    command = ["paper", "merging-cost", *options(place, "switch_transformers"), "--layers", "1,2", "-o", str(tmp_path)]
    data = json.loads(CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False).stdout)
    assert set(data["rows"]) == {"1", "2"} and all(set(row) == set(STAGES) for row in data["rows"].values())
    assert all(stage["seconds"] > 0 for row in data["rows"].values() for stage in row.values())
    assert "12.30 min" in (tmp_path / "merging-cost.md").read_text()
    asked = Asked("merging-cost", str(place / "qwen3_moe"), calibration=str(place / "text.safetensors"), judged=False)
    with pytest.raises(MoepressError, match="99 of them cannot be merged"):
        measure_merging(asked, (99,), tmp_path)
    with pytest.raises(MoepressError, match="what to calibrate on"):
        measure_running(Running(Asked("cost", str(place / "qwen3_moe"), judged=False), (1,)), tmp_path)


def test_the_model_card_counts_what_a_token_meets() -> None:
    rows = {row["model"]: row for row in model_card()}
    assert {name: (row["l"], row["h"], row["e"], row["arch"]) for name, row in rows.items()} == {
        name: (int(row["paper"]["l"]), int(row["paper"]["h"]), int(row["paper"]["e"]), row["paper"]["arch"])
        for name, row in rows.items()
    }
    switch, fairseq = rows["switch-base-32"], rows["fairseq-moe-15b"]
    assert switch["act-size"] == pytest.approx(220e6, rel=0.02)
    assert fairseq["act-size"] == pytest.approx(155e6, rel=0.01)  # two experts a token, and routers of 512 rows
    expert = 2 * 768 * 3072 + 768 + 3072
    dense = rows["fairseq-dense-125m"]["size"]
    assert fairseq["act-size"] == dense + 6 * (expert + 512 * 768)


def test_the_settings_are_the_paper_s() -> None:
    assert all(row["here"] == row["paper"] for row in hyper_parameters())
    shown = CliRunner().invoke(app, ["paper", "hyper-parameters"], env={"COLUMNS": "200"}).stdout
    assert "0.9, 0.98" in shown


def test_printed_costs_are_the_paper_s(fixtures: Path) -> None:
    source = (fixtures / "reference" / "paper.tex").read_text().replace("$", "").replace("~", " ")
    for stage in PRINTED.values():
        assert all(value in source for row in stage for value in row)
    for table in RUNNING.values():
        for where, _, rows in table.printed:
            place: Any = source[: source.index(f"label{{{where}}}")].rpartition(r"\begin{table}")[2]
            assert all(value in place for row in rows for value in row[1:])
