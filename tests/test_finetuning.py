"""`moepress finetune`: the settings that are tried, which is kept, and going on."""

import json
import sys

import pytest
import torch

from moepress import finetuning
from moepress.checkpoint.load import load_model
from moepress.errors import MoepressError
from moepress.finetuning import PAPER_GRID, Search, finetune, several

from . import zoo
from .texts import words, write

FAST = {"length": 24, "evaluate_every": 2, "save_every": 1}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Sentences whose first word decides; answers of one word each would be negative and positive."""
    folder = tmp_path_factory.mktemp("tasks")
    records = [{"sentence": words(5 + 20 * (i % 2), 30 + i % 7), "label": i % 2} for i in range(16)]
    for split in ("train", "validation"):
        write(folder / "sst2" / f"{split}.jsonl", records)
    return f"sst2@{folder}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, word_tokenizer):
    out = tmp_path_factory.mktemp("model") / "pretrained"
    zoo.build("qwen3_moe").save_pretrained(out)
    word_tokenizer.save_pretrained(out)
    return out


def test_the_settings_of_the_paper():
    assert several("lr", None, True, 1.0) == (3e-4, 1e-4, 3e-5, 1e-5) and several("lr", None, False, 1.0) == (1.0,)
    assert several("lr", [1e-3, 1e-4], True, 1.0) == (1e-3, 1e-4) and several("epochs", 2, True, 1.0) == (2,)
    assert PAPER_GRID["batch_size"] == (8, 16, 32, 64) and PAPER_GRID["epochs"] == (3, 5, 10, 20)
    with pytest.raises(MoepressError, match="lr is an empty list"):
        several("lr", [], False, 1.0)


def values(monkeypatch, wanted):
    """Metrics by setting, so that it is known which should be kept."""
    given = iter(wanted)
    real = finetuning.task_metrics

    def measured(*arguments, **options):
        score = real(*arguments, **options)
        score.metrics["accuracy"] = next(given)
        return score

    monkeypatch.setattr(finetuning, "task_metrics", measured)


def test_the_best_setting_is_kept(folder, task, tmp_path, monkeypatch):
    values(monkeypatch, [0.5, 0.75, 0.75, 0.25])
    result = finetune(folder, tmp_path / "out", task=task, lr=[1e-3, 3e-3], batch_size=[8, 4], epochs=0.5, **FAST)
    assert [(row["lr"], row["batch_size"], row["steps"]) for row in result.search] == [
        (1e-3, 8, 1), (1e-3, 4, 2), (3e-3, 8, 1), (3e-3, 4, 2),
    ]  # fmt: skip
    assert result.made["options"]["lr"] == 1e-3 and result.made["options"]["batch_size"] == 4
    (entry,) = json.loads((tmp_path / "out.moepress" / "recovery.json").read_text())
    assert len(entry["search"]) == 4 and entry["teacher"] is None
    assert not list(tmp_path.glob(".*"))


def test_every_setting_starts_from_the_same_weights(folder, task, tmp_path, monkeypatch):
    values(monkeypatch, [0.1, 0.9, 0.9])
    both = finetune(folder, tmp_path / "both", task=task, lr=[3e-3, 1e-3], batch_size=4, epochs=0.5, **FAST)
    alone = finetune(folder, tmp_path / "alone", task=task, lr=1e-3, batch_size=4, epochs=0.5, **FAST)
    assert both.report == alone.report
    one, other = load_model(tmp_path / "both").state_dict(), load_model(tmp_path / "alone").state_dict()
    assert all(tensor.equal(other[name]) for name, tensor in one.items())


def test_a_search_goes_on(folder, task, tmp_path, monkeypatch):
    settings = {"task": task, "lr": [3e-3, 1e-3, 1e-4], "batch_size": 4, "epochs": 0.5}
    values(monkeypatch, [0.9, 0.1])
    with pytest.raises(StopIteration):  # dies in the third
        finetune(folder, tmp_path / "out", **settings, **FAST)
    monkeypatch.undo()
    with pytest.raises(MoepressError, match="holds an interrupted search"):
        finetune(folder, tmp_path / "out", **settings, **FAST)
    with pytest.raises(MoepressError, match="was started with"):
        finetune(folder, tmp_path / "out", **settings | {"epochs": 1}, resume=True, **FAST)
    values(monkeypatch, [0.5])
    result = finetune(folder, tmp_path / "out", **settings, resume=True, **FAST)
    assert [row["value"] for row in result.search] == [0.9, 0.1, 0.5] and result.made["options"]["lr"] == 3e-3
    whole = load_model(tmp_path / "out").state_dict()
    assert all(tensor.equal(whole[name]) for name, tensor in result.model.state_dict().items())
    assert not torch.equal(whole["lm_head.weight"], zoo.build("qwen3_moe").state_dict()["lm_head.weight"])


def test_no_two_bests_are_kept(tmp_path):
    model = torch.nn.Linear(2, 2)
    search = Search(tmp_path / "state", {"lr": [1, 2]}, False)
    for value in (0.3, 0.2, 0.5):
        search.add({"value": value}, model)
    assert [path.name for path in (tmp_path / "state").glob("best-*")] == ["best-2.pt"]


def test_the_command(folder, task, tmp_path, monkeypatch, capsys):
    from moepress.cli import main

    arguments = ["finetune", folder, "-o", tmp_path / "out", "--task", task, "--lr", "1e-3,1e-2", "--batch-size", "8",
                 "--epochs", "1", "--length", "24"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["moepress", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    printed = capsys.readouterr().out
    assert "accuracy" in printed and "0.01" in printed and (tmp_path / "out" / "model.safetensors").exists()
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-6], "--lr", "fast"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and "--lr wants numbers with commas" in capsys.readouterr().err
