"""The report of a compression: made from saved values alone, complete without a network, readable in a browser."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

import moepress
from moepress.cli.compress import given_options, parse_keep
from moepress.cli.main import app
from moepress.command import compress_command
from moepress.errors import MoepressError
from moepress.recipe import make_recipe
from moepress.report.numbers import change, count, percent, took
from moepress.report.records import short_names

from .browser import AVAILABLE, browser

ASSETS = Path(moepress.__file__).parent / "assets"
MODEL, TEXT, HELD = ASSETS / "demo-moe", ASSETS / "demo-text.jsonl", ASSETS / "demo-eval.jsonl"
FEW = {"calibration": {"samples": 8, "length": 64}}
FIGURES = {"size", "usage", "budget", "alignment-gap", "time"} | {
    f"{kind}-{layer}" for kind in ("similarity", "groups") for layer in range(4)
}


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "merged"
    moepress.compress(MODEL, out, method="m-smoe", keep=0.5, calibration=str(TEXT), recipe=FEW)
    return out


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "pruned"
    moepress.compress(MODEL, out, method="prune-refit", format="vanilla", keep=8, calibration=str(TEXT), recipe=FEW)
    return out


class Sources(HTMLParser):
    """Every tag, and every address that a browser would go to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name in ("src", "href", "xlink:href", "srcset", "action"):
                self.addresses.append(value)


def read(page: Path) -> tuple[str, Sources]:
    text = page.read_text(encoding="utf-8")
    return text, Sources(text)


def test_a_page_that_needs_nothing_else(merged):
    text, found = read(merged / "moepress" / "report.html")
    assert all(address.startswith(("data:", "#")) for address in found.addresses)
    assert not re.search(r"@import|url\(['\"]?(?!#|data:)", text)
    assert len(found.ids) == len(set(found.ids))
    assert {"h1", "svg", "table"} - set(found.tags) == {"table"}  # a table comes with an evaluation
    assert len(text) < 400_000


def test_every_figure_as_svg_png_and_csv(merged):
    folder = merged / "moepress" / "figures"
    assert {file.name for file in folder.iterdir()} == {f"{n}.{k}" for n in FIGURES for k in ("svg", "png", "csv")}
    for file in folder.glob("*.svg"):
        assert ElementTree.parse(file).getroot().tag.endswith("svg")
    for file in folder.glob("*.png"):
        assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 2000


def test_the_data_are_the_saved_values(merged):
    records = merged / "moepress"
    plan = json.loads((records / "plan.json").read_text())
    summary = json.loads((records / "report.json").read_text())
    table = lambda name: list(csv.DictReader((records / "figures" / f"{name}.csv").open()))  # noqa: E731
    assert [int(row["kept"]) for row in table("budget")] == [len(layer["groups"]) for layer in plan["layers"]]
    assert [float(row["certified_gap"]) for row in table("alignment-gap")] == list(summary["alignment_gap"].values())
    for layer in range(4):
        rows = [row for row in table("usage") if row["layer"] == f"model.layers.{layer}.mlp"]
        assert sum(float(row["share"]) for row in rows) == pytest.approx(1)
        leaders = {int(row["expert"]) for row in rows if row["leads_a_group"] == "True"}
        assert leaders == {group["leader"] for group in plan["layers"][layer]["groups"]}
        assert all(float(row[row["expert"]]) == pytest.approx(1) for row in table(f"similarity-{layer}"))
        where = {int(row["expert"]): row["new_expert"] for row in table(f"groups-{layer}")}
        for place, group in enumerate(plan["layers"][layer]["groups"]):
            assert {where[expert] for expert in group["members"]} == {str(place)}


def test_damage_and_no_similarity_where_nothing_is_merged(pruned):
    records = pruned.with_name("pruned.moepress")
    assert not (pruned / "moepress").exists()
    figures = {file.stem for file in (records / "figures").glob("*.svg")}
    assert "output-error" in figures and not any(name.startswith(("similarity", "alignment")) for name in figures)
    error = json.loads((records / "report.json").read_text())["output_error"]
    assert len(error) == 4 and all(0 < value < 1 for value in error.values())
    assert "dropped 32 experts" in read(records / "report.html")[0]


def test_an_evaluation_goes_into_the_report(merged, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(merged, out)
    asked = ["evaluate", str(out), "--against", str(MODEL), "--text", str(HELD), "--samples", "4", "--length", "64"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, [*asked, "--json"])  # the same again takes the place of the first
    kl = json.loads(done.stdout)["kl"]
    saved = json.loads((out / "moepress" / "evaluation.json").read_text())
    assert len(saved) == 1 and saved[0]["score"]["kl"] == kl
    text, found = read(out / "moepress" / "report.html")
    assert f"{kl:.3g}" in text and "table" in found.tags
    CliRunner().invoke(app, [*asked, "--length", "32", "--no-record"])
    assert json.loads((out / "moepress" / "evaluation.json").read_text()) == saved


def test_the_report_can_be_drawn_again_from_its_records_alone(merged, tmp_path):
    shutil.copytree(merged / "moepress", tmp_path / "records")
    before = (tmp_path / "records" / "report.html").read_text()
    (tmp_path / "records" / "report.html").unlink()
    shutil.rmtree(tmp_path / "records" / "figures")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "records")])
    assert done.exit_code == 0 and done.stdout.strip() == str(tmp_path / "records" / "report.html")
    assert (tmp_path / "records" / "report.html").read_text() == before
    with pytest.raises(MoepressError, match="no records of a compression"):
        moepress.write_report(tmp_path)


def test_what_is_not_saved_is_not_shown(merged, tmp_path):
    records = tmp_path / "records"
    shutil.copytree(merged / "moepress", records)
    for name in ("similarity.safetensors", "statistics.json"):
        (records / name).unlink()
    shutil.rmtree(records / "figures")
    moepress.write_report(records)
    assert {f.stem for f in (records / "figures").glob("*.svg")} == {
        name for name in FIGURES if not name.startswith(("similarity", "usage"))
    }


def test_values_of_a_decomposition_are_shown(merged, tmp_path):
    records = tmp_path / "records"
    shutil.copytree(merged / "moepress", records)
    summary = json.loads((records / "report.json").read_text())
    names = [f"model.layers.{i}.mlp" for i in range(4)]
    summary["stable_rank"] = {name: {"before": [9.0, 8.0], "after": [4.0, 3.0]} for name in names}
    summary["remaining"] = {name: [0.2, 0.4, 0.3] for name in names}
    (records / "report.json").write_text(json.dumps(summary))
    moepress.write_report(records)
    rows = list(csv.DictReader((records / "figures" / "remaining.csv").open()))
    assert [float(row["share"]) for row in rows] == [0.2, 0.4, 0.3] * 4
    assert "8.5 → 3.5" in read(records / "report.html")[0]


@pytest.mark.parametrize(
    "given",
    [
        {"keep": 0.5},
        {"method": "m-smoe", "keep": 8, "preset": "paper", "seed": 3, "router": "keep", "plan.budget": "uniform"},
        {"method": "auto", "target_size": "7MB", "format": "vanilla",
         "refit.method": {"name": "least-squares", "ridge": 1.0}},
        {"method": "reap", "keep": 4, "calibration": {"samples": "all", "pack": "window", "length": 64}},
    ],
)  # fmt: skip
def test_the_command_makes_the_same_recipe_again(given):
    recipe = make_recipe(given, {"calibration.source": "a b.jsonl"})
    words = shlex.split(compress_command(recipe, "MODEL", "OUT"))
    assert words[:5] == ["moepress", "compress", "MODEL", "-o", "OUT"]
    options = dict(zip(words[5::2], words[6::2], strict=True))
    settings = [value for option, value in zip(words[5::2], words[6::2], strict=True) if option == "--set"]
    calibration = {"calibration": "source", "samples": "samples", "length": "length", "batch-size": "batch_size"}
    named = {}
    for option, value in options.items():
        name = option.removeprefix("--")
        if name == "keep":
            named["keep"] = parse_keep(value)
        elif name != "set":
            key = f"calibration.{calibration[name]}" if name in calibration else name.replace("-", "_")
            named[key] = int(value) if value.isdigit() else value
    assert make_recipe(given_options(named, settings)) == recipe


def test_numbers_as_people_read_them():
    assert [count(n) for n in (999, 1234567, 30.5e9)] == ["999", "1.23 M", "30.5 B"]
    assert [percent(x) for x in (0.0000267, 0.5, 0, 1e-9)] == ["0.0027 %", "50 %", "0 %", "0.0000001 %"]
    assert change(8, 4) == "−50 %" and change(100, 99.5) == "−0.5 %" and took(3720) == "1 h 2 min"
    assert short_names(["m.0.mlp", "m.10.mlp"]) == ["0", "10"]
    layers = ["encoder.block.1.layer.1.mlp", "decoder.block.1.layer.2.mlp"]
    assert short_names(layers) == ["encoder.1.1", "decoder.1.2"]


@pytest.mark.skipif(not AVAILABLE, reason="needs chromium and chromedriver")
def test_in_a_browser(merged):
    page = merged / "moepress" / "report.html"
    with browser() as seen:
        for width in (390, 1440):
            for dark in (False, True):
                seen.open(page, width, dark)
                assert seen.run("return document.documentElement.scrollWidth <= innerWidth"), "scrolls sideways"
                assert seen.run("return getComputedStyle(document.body).color") == (
                    "rgb(231, 236, 242)" if dark else "rgb(24, 33, 43)"
                )
                assert seen.run("return document.querySelectorAll('.option:not([hidden])').length") == 1
                seen.run("document.querySelectorAll('.choice .bar button')[2].click()")
                assert "Layer 2" in seen.run("return document.querySelector('.option:not([hidden]) h3').textContent")
        seen.run("document.getElementById('usage').scrollIntoView()")
        x, y = seen.run(
            "const box = document.querySelector('#usage .only-wide svg').getBoundingClientRect();"
            "const at = JSON.parse(document.querySelector('#usage .hover').textContent).at.wide;"
            "return [box.left + box.width * (at[0] + 0.5 / 16 * (at[2] - at[0])),"
            "        box.top + box.height * (at[1] + 0.5 / 4 * (at[3] - at[1]))]"
        )
        seen.point(x, y)
        share = next(csv.DictReader((page.parent / "figures" / "usage.csv").open()))["share"]
        said = seen.run("return document.getElementById('tip').textContent")
        assert said.startswith("layer 0, expert 0: ") and percent(float(share)) in said
        assert seen.log() == []
