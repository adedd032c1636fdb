"""The page of a large model stays a file that one can open, and what it leaves out is among the files."""

from __future__ import annotations

import csv
import shutil

import pytest
from typer.testing import CliRunner

from moepress.cli.main import app
from moepress.plan import Plan
from moepress.report import draw_report
from moepress.report.figures.groups import listed

from .browser import AVAILABLE, browser
from .made_up_report import make_records
from .test_report import read

LAYERS, EXPERTS = 48, 128


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return draw_report(make_records(tmp_path_factory.mktemp("report") / "large", LAYERS, EXPERTS))


def drawn(page):
    return {file.stem for file in (page.parent / "figures").glob("similarity-*.svg")}


def test_size_and_number_of_elements(large):
    text, found = read(large)
    assert len(text.encode()) < 3_000_000
    assert len(found.tags) < 15_000
    assert all(address.startswith(("data:", "#")) for address in found.addresses)


def test_only_what_is_shown_is_drawn_and_all_data_are_written(large):
    text, found = read(large)
    shown = {name for name in found.ids if name.startswith("similarity-") and "narrow" not in name}
    assert 5 <= len(shown) < LAYERS and {"similarity-0", f"similarity-{LAYERS - 1}"} <= shown
    assert drawn(large) == shown
    assert f"{len(shown)} of {LAYERS} changed layers are shown" in text and "--every-layer" in text
    plan = Plan.load(large.parent / "plan.json")
    for i, layer in enumerate(plan.layers):
        rows = list(csv.DictReader((large.parent / "figures" / f"similarity-{i}.csv").open()))
        assert len(rows) == EXPERTS and all(float(row[row["expert"]]) == pytest.approx(1) for row in rows)
        rows = list(csv.DictReader((large.parent / "figures" / f"groups-{i}.csv").open()))
        where = {int(row["expert"]): int(row["new_expert"]) for row in rows}
        assert [where[expert] for expert in range(EXPERTS)] == layer.expert_map()


def test_every_dot_of_the_heat_map_is_there(large):
    svg = (large.parent / "figures" / "usage.svg").read_text()
    path = max((part.split('"')[0] for part in svg.split(' d="')[1:]), key=len)
    assert path.count("M") == LAYERS * EXPERTS // 2


def test_every_layer_on_demand(tmp_path, monkeypatch):
    monkeypatch.setattr("moepress.report.report.CELLS", 2 * 8 * 8)
    records = make_records(tmp_path / "records", 3, 8)
    page = draw_report(records)
    assert drawn(page) == {"similarity-0", "similarity-2"}
    done = CliRunner().invoke(app, ["report", str(records), "--every-layer"])
    assert done.exit_code == 0, done.output
    assert drawn(page) == {f"similarity-{i}" for i in range(3)}
    assert "their figures too" in read(page)[0]


def test_a_large_group_is_not_listed_by_each_of_its_members():
    assert listed((3, 1)) == "3, 1"
    assert listed(range(100)).endswith("10, 11 and 88 more")


@pytest.mark.skipif(not AVAILABLE, reason="needs chromium and chromedriver")
def test_in_a_browser(large, tmp_path):
    page = shutil.copy(large, tmp_path / "alone.html")  # nothing beside it
    with browser() as seen:
        for width in (390, 1440):
            seen.open(page, width)
            assert seen.run("return document.documentElement.scrollWidth <= innerWidth"), "scrolls sideways"
            seen.run("document.querySelectorAll('.choice .bar button')[1].click()")
            assert seen.run("return document.querySelectorAll('.option:not([hidden])').length") == 1
        assert seen.log() == []
