"""The model card of an output: what it says, what it leaves to others, and that it is no part of the checksums."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import moepress
from moepress.checkpoint.hub import hub_name
from moepress.report.card import CARD, ORIGINAL, QUALITY, UNMEASURED, name_in_card, public, public_command
from tests.clients.models import ASSETS, DEMO
from tests.squeeze import silent  # noqa: F401

TEXT = str(ASSETS / "demo-text.jsonl")
FEW: dict[str, Any] = {"samples": 4, "length": 64}
LITTLE = {f"calibration.{name}": value for name, value in FEW.items()}
THEIRS = """---
license: other
license_name: their-own
license_link: LICENSE
language: [en, cy]
metrics: [accuracy]
model-index: [{name: x, results: []}]
---
# The original
It is right 91 times of 100.
"""


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is another test's."""
    for place in ("moepress.api", "moepress.records"):
        monkeypatch.setattr(f"{place}.draw_report", lambda records: records / "report.html")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "models--someone--demo" / "snapshots" / "abc"
    shutil.copytree(DEMO, folder)
    (folder / CARD).write_text(THEIRS)
    return folder


def made(original: Path, out: Path, **options: Any) -> Path:
    options = {"method": "frequency-pruning", "keep": 0.5} | options
    moepress.compress(original, out, calibration=TEXT, **options, **LITTLE)
    return out


@pytest.mark.parametrize("format", ["compact", "vanilla"])
def test_what_a_card_says(format: str, original: Path, tmp_path: Path) -> None:
    out = made(original, tmp_path / "out", format=format)
    card = ModelCard.load(out / CARD)
    data = card.data.to_dict()
    assert data.pop("tags") == ["moepress", "mixture-of-experts", "compressed"]
    assert data == {
        "base_model": "someone/demo", "library_name": "transformers", "pipeline_tag": "text-generation",
        "license": "other", "license_name": "their-own", "license_link": "LICENSE", "language": ["en", "cy"],
    }  # fmt: skip
    records = out / "moepress" if format == "compact" else tmp_path / "out.moepress"
    report = json.loads((records / "report.json").read_text())
    assert report["base_model"] == "someone/demo"
    for size in ("before", "after"):
        assert f"{report[size]['parameters']:,}" in card.text
    for words in (
        "[someone/demo](https://huggingface.co/someone/demo)", "frequency-pruning", "source: demo-text.jsonl",
        UNMEASURED,
    ):  # fmt: skip
        assert words in card.text
    assert ("import moepress" in card.text) == (format == "compact")
    assert str(tmp_path) not in card.text and str(ASSETS) not in card.text


def test_the_code_in_a_card_runs(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(original, tmp_path / "out")
    code = (tmp_path / "out" / CARD).read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    exec(code, space)
    assert space["model"].config.num_hidden_layers == 4 and space["tokenizer"]("a").input_ids


def test_the_originals_card_is_kept_as_its_own(original: Path, tmp_path: Path) -> None:
    out = made(original, tmp_path / "out")
    assert (out / ORIGINAL).read_text() == THEIRS
    assert "91 times" not in (out / CARD).read_text() and ORIGINAL in (out / CARD).read_text()
    assert ORIGINAL in json.loads((out / "moepress" / "manifest.json").read_text())["files"]


@pytest.mark.parametrize("theirs", [None, "no metadata", "---\n: [\n---\nx", "---\n- a\n---\nx", b"\xff\xfe"])
def test_an_original_without_a_card_that_can_be_read(theirs: Any, tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "in")
    if theirs is not None:
        (tmp_path / "in" / CARD).write_bytes(theirs if isinstance(theirs, bytes) else theirs.encode())
    out = made(tmp_path / "in", tmp_path / "out")
    assert (out / ORIGINAL).exists() == (theirs is not None)
    data = ModelCard.load(out / CARD).data.to_dict()
    assert set(data) == {"library_name", "pipeline_tag", "tags"}  # a folder has no name on the Hub


def test_evaluation_goes_into_the_card(original: Path, tmp_path: Path) -> None:
    out = made(original, tmp_path / "out")
    card = out / CARD
    card.write_text(card.read_text().replace("# out", "# My model\n\nMine."))
    held_out = str(ASSETS / "demo-eval.jsonl")
    for length in (32, 64, 64):
        score = moepress.evaluate(out, against=original, text=held_out, samples=4, length=length)
        moepress.record_evaluation(out, score, against=str(original), text=held_out, length=length)
    text = card.read_text()
    assert text.count("### On demo-eval.jsonl") == 2 and UNMEASURED not in text
    assert f"{score['kl']:.4g}" in text and "# My model\n\nMine." in text
    assert str(tmp_path) not in text and "--text demo-eval.jsonl" in text
    found = moepress.verify(out)
    assert found.whole and not found.extra

    card.write_text("Mine alone.\n")  # no place for it: left as it is
    moepress.record_evaluation(out, score, text=held_out)
    assert card.read_text() == "Mine alone.\n"
    card.unlink()
    moepress.record_evaluation(out, score, text=held_out)
    assert not card.exists() and moepress.verify(out).whole


def test_a_vanilla_output_beside_its_records(original: Path, tmp_path: Path) -> None:
    out = made(original, tmp_path / "out", format="vanilla")
    score = {"perplexity": 12.25, "tokens": 7}
    for place in (out, tmp_path / "out.moepress"):
        moepress.record_evaluation(place, score, text=f"{place.name}.jsonl")
    assert (out / CARD).read_text().count("12.25") == 2
    assert moepress.verify(out).whole


def test_an_export_has_a_card_records_and_checksums(original: Path, tmp_path: Path) -> None:
    compact = made(original, tmp_path / "compact", method="m-smoe")
    moepress.record_evaluation(compact, {"perplexity": 12.25, "tokens": 7}, text="a.jsonl")
    sizes = moepress.export(compact, tmp_path / "full", duplicate=True)
    card = ModelCard.load(tmp_path / "full" / CARD)
    assert card.data.base_model == "someone/demo" and card.data.license == "other"
    assert "import moepress" not in card.text and "no smaller" in card.text and "12.25" in card.text
    assert f"{sizes.parameters:,} | +0 %" in card.text
    assert (tmp_path / "full" / ORIGINAL).read_text() == THEIRS
    assert moepress.verify(tmp_path / "full").whole


def test_an_export_of_what_has_no_records(original: Path, tmp_path: Path) -> None:
    compact = made(original, tmp_path / "compact")
    for record in ("report.json", "recipe.yaml", "plan.json"):
        (compact / "moepress" / record).unlink()
    moepress.export(compact, tmp_path / "vanilla")
    assert "import moepress" not in (tmp_path / "vanilla" / CARD).read_text()
    shutil.rmtree(compact / "moepress")
    moepress.export(compact, tmp_path / "vanilla", overwrite=True)
    assert moepress.verify(tmp_path / "vanilla").whole


def test_recovery_builds_upon_the_card(original: Path, tmp_path: Path) -> None:
    student = made(original, tmp_path / "student")
    moepress.record_evaluation(student, {"perplexity": 12.25, "tokens": 7}, text="a.jsonl")
    moepress.recover(student, tmp_path / "better", teacher=original, data=TEXT, steps=1, batch_size=2, **FEW)
    card = ModelCard.load(tmp_path / "better" / CARD)
    assert card.data.base_model == "someone/demo" and card.data.license == "other"
    assert "Then trained for 1 steps on `demo-text.jsonl`" in card.text and "someone/demo" in card.text
    assert UNMEASURED in card.text and "12.25" not in card.text  # that was before
    assert (tmp_path / "better" / ORIGINAL).read_text() == THEIRS
    assert moepress.verify(tmp_path / "better").whole


def test_the_name_on_the_hub(original: Path, tmp_path: Path) -> None:
    out = made(original, tmp_path / "out")
    card = out / CARD
    card.write_text(card.read_text() + '\nCompare with `from_pretrained("another")`.\n')
    for name in ("me/out", "us/again"):
        name_in_card(out, name)
        assert card.read_text().count(f'from_pretrained("{name}")') == 2
    assert 'from_pretrained("another")' in card.read_text() and "me/out" not in card.read_text()
    assert QUALITY in card.read_text()


def test_paths_of_the_machine_stay_at_home() -> None:
    assert public("/home/me/text.jsonl") == "text.jsonl"
    assert public("/home/me/a.jsonl:0.3,b.jsonl:0.7") == "a.jsonl:0.3,b.jsonl:0.7"
    assert public("hub:org/name:train") == "hub:org/name:train"
    assert public("task:sst2@/home/me/sst2") == "task:sst2@sst2"
    assert public("org/model", "org/model") == "org/model" and public("me/model", "org/model") == "model"
    assert public(r"C:\Users\me\text.jsonl") == "text.jsonl"
    assert public_command("moepress compress /home/me/in -o '/x y/out'") == "moepress compress in -o out"


def test_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/model") == "org/model"
    os.makedirs("org/model")
    assert hub_name("org/model") is None and hub_name("model") is None and hub_name("/a/b") is None
    cached = tmp_path / "models--a-b--c.d" / "snapshots" / "0"
    cached.mkdir(parents=True)
    assert hub_name(cached) == "a-b/c.d"
