"""`moepress recover` and its Python form: what is written, what is kept, what is refused before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import moepress
from moepress.checkpoint.load import load_model
from moepress.errors import MoepressError
from moepress.recovery import TrainingHook
from moepress.training import recover

from .texts import write

ASSETS = Path(moepress.__file__).parent / "assets"
MODEL, TEXT, HELD = str(ASSETS / "demo-moe"), str(ASSETS / "demo-text.jsonl"), str(ASSETS / "demo-eval.jsonl")
SHORT = {"samples": 24, "length": 48, "steps": 4, "batch_size": 4, "evaluate_every": 2, "save_every": 1}


@pytest.fixture(scope="module")
def compact(tmp_path_factory):
    out = tmp_path_factory.mktemp("compact") / "model"
    moepress.compress(
        MODEL, out, method="m-smoe", keep=8, calibration=TEXT, **{"calibration.samples": 8, "calibration.length": 64}
    )
    return out


def test_recover_keeps_and_extends_the_records(compact, tmp_path, run):
    out = tmp_path / "out"
    options = [word for name, value in SHORT.items() for word in (f"--{name.replace('_', '-')}", value)]
    code, text, err = run("recover", compact, "-o", out, "--teacher", MODEL, "--data", TEXT, *options, "--json")
    assert code == 0, err
    said = json.loads(text)
    assert said["report"]["steps"] == 4 and [step for step, _ in said["report"]["held_out"]] == [0, 2, 4]
    for name in ("plan.json", "recipe.yaml", "report.json"):
        assert (out / "moepress" / name).read_bytes() == (compact / "moepress" / name).read_bytes()
    (entry,) = json.loads((out / "moepress" / "recovery.json").read_text())
    assert entry["teacher"] == MODEL and entry["options"]["steps"] == 4 and entry["report"] == said["report"]
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert moepress.verify(out).whole
    before, after = (moepress.evaluate(m, against=MODEL, text=HELD, samples=12, length=48) for m in (compact, out))
    assert after["kl"] < before["kl"]
    again = recover(out, tmp_path / "again", teacher=MODEL, data=TEXT, **SHORT)
    assert len(json.loads((again.folder / "moepress" / "recovery.json").read_text())) == 2


def test_a_vanilla_student(tmp_path):
    small, out = tmp_path / "small", tmp_path / "out"
    moepress.compress(MODEL, small, keep=8, format="vanilla", calibration=TEXT, **{"calibration.samples": 8})
    recover(small, out, teacher=MODEL, data=TEXT, **SHORT)
    assert (tmp_path / "out.moepress" / "recipe.yaml").exists() and not (out / "moepress").exists()
    assert (tmp_path / "out.moepress" / "recovery.json").exists() and (out / "tokenizer.json").exists()
    assert load_model(out).config.num_experts == 8 and moepress.verify(out).whole


class Killer(TrainingHook):
    def after_step(self, step):
        if step == 3:
            raise KeyboardInterrupt


def test_resume(compact, tmp_path):
    whole = recover(compact, tmp_path / "whole", teacher=MODEL, data=TEXT, **SHORT)
    with pytest.raises(KeyboardInterrupt):
        recover(compact, tmp_path / "out", teacher=MODEL, data=TEXT, hooks=[Killer()], **SHORT)
    assert not (tmp_path / "out").exists()
    with pytest.raises(MoepressError, match="holds an interrupted run: go on with it"):
        recover(compact, tmp_path / "out", teacher=MODEL, data=TEXT, **SHORT)
    # Hooks are part of a run: the one that broke off has no state of its own.
    result = recover(compact, tmp_path / "out", teacher=MODEL, data=TEXT, hooks=[TrainingHook()], resume=True, **SHORT)
    assert result.report == whole.report
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out")]
    assert weights[0] == weights[1] and not (tmp_path / ".out.training").exists()


def test_a_labelled_task(compact, tmp_path):
    records = [{"sentence": f"film {i} is {'good' if i % 2 else 'bad'}", "label": i % 2} for i in range(16)]
    write(tmp_path / "tasks/sst2/train.jsonl", records)
    write(tmp_path / "tasks/sst2/validation.jsonl", records[:4])
    task = f"sst2@{tmp_path / 'tasks'}"
    result = recover(compact, teacher=MODEL, task=task, epochs=1.5, batch_size=8, evaluate_every=1, length=64)
    assert result.report.steps == 3 and result.made["options"]["objective"] == "task"
    assert result.made["data"] == f"task:{task}" and len(result.report.held_out) == 4
    alone = recover(compact, task=task, steps=1, batch_size=8, alpha=0.0, length=64)
    assert not alone.report.kl


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "on either text .data. or a task"),
        ({"data": TEXT}, "distillation needs a teacher"),
        ({"data": TEXT, "teacher": MODEL, "step": 3}, "unknown option 'step': did you mean 'steps'"),
        ({"data": "nowhere.jsonl", "teacher": MODEL}, "there is no file nowhere.jsonl"),
        ({"data": TEXT, "teacher": MODEL, "epochs": 0}, "epochs must be above 0"),
    ],
)
def test_what_is_refused(compact, tmp_path, options, message):
    with pytest.raises(MoepressError, match=message):
        recover(compact, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_a_teacher_with_another_vocabulary(compact, tmp_path):
    from . import zoo

    with pytest.raises(MoepressError, match="have|vocabulary of 8192"):
        recover(compact, tmp_path / "out", teacher=zoo.build("qwen3_moe"), data=TEXT, **SHORT)
