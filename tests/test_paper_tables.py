"""The paper's tables: every row is measured once and kept, equal groups are equal, the control is what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import moepress
from moepress.cli.main import app
from moepress.data import window_batches
from moepress.errors import MoepressError
from moepress.evaluation import compare
from moepress.models.find import find_layers
from moepress.paper import quality
from moepress.paper.asked import Asked
from moepress.paper.cells import cell_key, parts_of, row_key, rows_of
from moepress.paper.quality import make_table
from moepress.paper.tables import TABLES
from moepress.paper.tables.base import CONTROL
from moepress.paper.words import difference, tables_of

from . import zoo

ASSETS = Path(moepress.__file__).parent / "assets"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model and windows of random tokens."""
    folder = tmp_path_factory.mktemp("paper")
    zoo.build("qwen3_moe").save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(0)
    for name, count in (("calibration", 12), ("held-out", 4)):
        ids = torch.randint(3, 80, (count, 16), generator=generator)
        save_file({"input_ids": ids}, folder / f"{name}.safetensors")
    return folder


def asked(place: Path, table: str, **more: Any) -> Asked:
    given: dict[str, Any] = {"text": str(place / "held-out.safetensors"), "samples": 8, "seeds": 2, "keep": 0.5}
    return Asked(table, str(place / "model"), calibration=str(place / "calibration.safetensors"), **given | more)


@pytest.fixture(scope="module")
def ablations(place: Path) -> dict[str, Any]:
    return make_table(asked(place, "ablations"), place / "out")


def cell(data: dict[str, Any], table: str, row: str, seed: int) -> dict[str, Any]:
    found = next(r for part in parts_of(table) for r in part.measured if r.name == row)
    return data["rows"][cell_key(found, "text", seed)]


def test_every_row_is_measured_and_written(place: Path, ablations: dict[str, Any]) -> None:
    done = [row for row in rows_of("ablations") if row.recipe is not None]
    assert len(ablations["rows"]) == 2 * len(done) + 2  # the full model and the control are one for all seeds
    assert len(done) == 1 + 1 + 7 + 2 + 2  # what two tables share is measured once
    assert json.loads((place / "out" / "ablations.json").read_text())["rows"] == ablations["rows"]
    text = (place / "out" / "ablations.md").read_text()
    assert ablations["command"] in text and "expert-feature.abs" in text and "65.66/85.49" in text
    assert (place / "out" / "ablations.png").stat().st_size > 1000
    assert cell(ablations, "similarities", "full", 0)["value"] == 0


def test_groups_are_equal_where_a_table_says_so(ablations: dict[str, Any]) -> None:
    for table in ("averaging", "alignment"):
        for seed in (0, 1):
            groups = [cell(ablations, table, row.name, seed)["groups"] for row in TABLES[table].rows]  # type: ignore[union-attr]
            assert groups[0] and all(other == groups[0] for other in groups)
    by_similarity = [
        json.dumps(cell(ablations, "similarities", row.name, 0)["groups"]) for row in parts_of("similarities")[0].rows
    ]
    assert len(set(by_similarity)) > 3
    sizes = [len(g) for g in cell(ablations, "uniform-adaptive", "uniform", 0)["groups"].values()]
    assert len(set(sizes)) == 1


def test_the_control_has_lost_its_experts(place: Path, ablations: dict[str, Any]) -> None:
    original, emptied = zoo.build("qwen3_moe"), zoo.build("qwen3_moe")
    for layer in find_layers(emptied):
        layer.adapter.write_bank(layer.block, layer.bank.map(lambda _, tensor: torch.zeros_like(tensor)))
    from safetensors.torch import load_file

    ids = load_file(place / "held-out.safetensors")["input_ids"]
    expected = compare(emptied, original, window_batches(ids, original.config)).kl
    assert cell(ablations, "similarities", CONTROL.name, 0)["value"] == pytest.approx(expected, rel=1e-6)
    assert expected > 0


@pytest.mark.parametrize("row", ["uniform", "frequency"])
def test_shared_statistics_change_nothing(place: Path, ablations: dict[str, Any], row: str) -> None:
    want = asked(place, "averaging")
    given = next(r.recipe for r in parts_of("averaging")[0].rows if r.name == row)
    assert given is not None
    alone = moepress.compress(place / "model", recipe=want.recipe(given, want.columns()[0], 1, 0.5))
    ids = quality.judge_of(want.columns()[0], want, zoo.build("qwen3_moe"), None)
    assert ids(alone.model)["value"] == cell(ablations, "averaging", row, 1)["value"]


def test_an_interrupted_table_goes_on(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = quality.measure

    def dies(row: Any, *rest: Any) -> Any:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(row_key(row))
        return real(row, *rest)

    monkeypatch.setattr(quality, "measure", dies)
    with pytest.raises(KeyboardInterrupt):
        make_table(asked(place, "averaging", seeds=1), tmp_path)
    monkeypatch.setattr(quality, "measure", lambda row, *rest: made.append(row_key(row)) or real(row, *rest))
    whole = make_table(asked(place, "averaging", seeds=1), tmp_path)
    assert len(made) == len(set(made)) == 5 and len(whole["rows"]) == 5
    monkeypatch.setattr(quality, "compress", None)  # nothing is done again, but what more seeds ask for
    assert make_table(asked(place, "averaging", seeds=1), tmp_path)["rows"] == whole["rows"]
    with pytest.raises(TypeError):
        make_table(asked(place, "averaging", seeds=2), tmp_path)
    with pytest.raises(MoepressError, match="other conditions"):
        make_table(asked(place, "averaging", seeds=1, samples=4), tmp_path)


def test_differences_are_taken_seed_by_seed() -> None:
    def low(*values: float) -> list[dict[str, Any]]:
        return [{"value": value, "better": "lower"} for value in values]

    assert difference(low(1.5, 2.5), low(1.0, 2.0)) == "+0.5000 ± 0.0000, worse 2/2"
    assert difference(low(3.0), low(1.0, 5.0)) == "+0.0000 ± 2.8284, worse 1/2"
    high = [{"value": 60.0, "better": "higher"}]
    assert difference([{"value": 58.0, "better": "higher"}], high) == "-2.0, worse 1/1"


def write_task(folder: Path) -> None:
    folder.mkdir()
    records = [{"sentence": f"a {word} film", "label": i % 2} for i, word in enumerate(["dull", "fine"] * 4)]
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")


def test_a_task_is_a_column(tmp_path: Path) -> None:
    write_task(tmp_path / "sst2")
    given = ["--task", f"sst2@{tmp_path}", "--seeds", "1", "--length", "32", "--samples", "8", "--limit", "4"]
    command = ["paper", "uniform-adaptive", "--model", str(ASSETS / "demo-moe"), *given, "-o", str(tmp_path / "out")]
    ran = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    data = json.loads(ran.stdout)
    first = next(iter(data["rows"].values()))
    assert set(first["shown"]) == {"sst2 accuracy %", "sst2 KL"} and first["more"]["examples"] == 4
    shown = tables_of(data)[0]
    assert "sst2 accuracy %" in shown.columns and "against adaptive" in shown.columns
    again = CliRunner().invoke(app, command, env={"COLUMNS": "200"}, catch_exceptions=False)
    assert "experts zeroed" in again.stdout and "74.48" in again.stdout


TRAINED = {"steps": 4, "train_batch_size": 4, "rank": 4, "seeds": 1, "lr": 1e-3}


SLOW = [pytest.param(table, marks=pytest.mark.slow) for table in ("merge-or-compress", "schedules", "zero-shot")]


@pytest.mark.parametrize("table", ["main", "distillation", *SLOW])
def test_rows_are_recovered(place: Path, tmp_path: Path, table: str) -> None:
    """With training where a table is about it, each row in its own way."""
    trained = {"rank": 4, "seeds": 1} if table == "zero-shot" else TRAINED
    data = make_table(asked(place, table, **trained), tmp_path)
    cells = {row.name: cell(data, table, row.name, 0) for row in parts_of(table)[0].measured if not row.dense}
    bytes_ = {name: each["bytes"] for name, each in cells.items()}
    values = {name: each["value"] for name, each in cells.items()}
    assert len(set(values.values())) >= len(values) - (table in ("main", "zero-shot"))  # two may drop the same experts
    if table == "main":
        assert bytes_["m-smoe"] == bytes_["averaging"] > bytes_["task-specific"]
        assert 0.5 < bytes_["task-specific"] / bytes_["pruning"] < 1.5
    if "mc-smoe" in bytes_:
        assert bytes_["mc-smoe"] < bytes_["m-smoe"] < bytes_["full"]
    if table == "schedules":
        last = [bytes_[name] for name in ("linear", "quadratic", "cubic")]  # columns of one matrix or another
        assert max(last) < 1.01 * min(last)
    assert tables_of(data)[0].rows and "dense" not in [row[0] for row in tables_of(data)[0].rows]


@pytest.mark.slow
def test_a_row_of_its_own_teacher_and_a_dense_model(tmp_path: Path) -> None:
    """The full model learns the task first, once; the dense model as well."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    write_task(tmp_path / "sst2")
    shape = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    known = json.loads((ASSETS / "demo-moe" / "config.json").read_text())
    Qwen3ForCausalLM(Qwen3Config(vocab_size=known["vocab_size"], **shape)).save_pretrained(tmp_path / "dense")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "dense" / name).write_bytes((ASSETS / "demo-moe" / name).read_bytes())
    want = Asked(
        "distillation",
        str(ASSETS / "demo-moe"),
        tasks=(f"sst2@{tmp_path}",),
        seeds=1,
        samples=8,
        length=32,
        steps=2,
        train_batch_size=4,
        finetune=1.0,
        dense=str(tmp_path / "dense"),
    )
    data = make_table(want, tmp_path / "out")
    assert (tmp_path / "out" / "demo-moe-sst2" / "config.json").is_file()
    assert len(data["rows"]) == 4
    rows = make_table(Asked(**{**vars(want), "table": "zero-shot", "steps": 0, "keep": 0.5}), tmp_path / "out")["rows"]
    assert rows["sst2 | seed 0 | dense"]["bytes"] < rows["sst2 | seed 0 | full"]["bytes"]
    assert (tmp_path / "out" / "dense-sst2").is_dir()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"text": None, "calibration": None}, "what to measure"),
        ({"calibration": None}, "give both"),
        ({"text": None, "tasks": ("sst2",)}, "its own training split"),
        ({"scoring": "mean"}, "text has none"),
        ({"table": "schedules"}, "give --steps"),
        ({"keep": 99}, "more than the 8 experts"),
        ({"changes": {"plan.similarity": "router-wait"}}, "did you mean 'router-weight'"),
        ({"changes": {"plan.skip": ["model.layers.9.mlp"]}}, "no MoE layer"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_any_work(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(quality, "measure", None)
    base = {"text": str(place / "held-out.safetensors"), "calibration": str(place / "calibration.safetensors")}
    with pytest.raises(MoepressError, match=words):
        make_table(Asked(**{"table": "alignment", "model": str(place / "model"), **base, **given}), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_list_says_what_each_needs() -> None:
    listed = CliRunner().invoke(app, ["paper"]).stdout
    for name, table in TABLES.items():
        assert re.search(rf"^{name} +{re.escape(table.title)}", listed, re.MULTILINE)
    assert "sizes" in listed and "Needs no weights" in listed


def test_printed_figures_are_the_paper_s(fixtures: Path) -> None:
    """The figures of a table's own place in the source, whichever way round it stands there."""
    source = (fixtures / "reference" / "paper.tex").read_text()
    tables = re.findall(r"\\begin\{(?:wrap)?table\}.*?\\end\{(?:wrap)?table\}", source, re.DOTALL)
    for name in TABLES:
        for part in parts_of(name):
            place = next(text for text in tables if f"label{{{part.where}}}" in text)
            plain = re.sub(r"(\d\.\d)\$(\d)", r"\1\2", place).replace("$M", "M").replace("$B", "B")
            said = set(re.findall(r"\d+\.\d+B?|\d+[MB]", plain))
            for row in part.rows:
                for value in row.paper.values():
                    assert set(value.split("/")) <= said, (name, row.name, value)
