"""The command line as users meet it: results, JSON, one sentence for every mistake, nothing half-written."""

from __future__ import annotations

import functools
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import moepress
from moepress.cli.output import print_table
from moepress.plan import Plan

ASSETS = Path(moepress.__file__).parent / "assets"
MODEL, TEXT = str(ASSETS / "demo-moe"), str(ASSETS / "demo-text.jsonl")
FEW = ["--samples", "4", "--length", "64"]


def test_compress_evaluate_export_inspect(run, tmp_path):
    out, vanilla = tmp_path / "out", tmp_path / "vanilla"
    code, text, err = run("compress", MODEL, "-o", out, "--keep", "8", "--calibration", TEXT, *FEW,
                          "--set", "plan.budget=uniform", "--router", "keep", "--json")  # fmt: skip
    assert code == 0 and err == "", err
    report = json.loads(text)
    assert report["after"]["expert_parameters"] * 2 == report["before"]["expert_parameters"]
    assert (out / "moepress" / "plan.json").exists()
    code, text, _ = run("inspect", out, "--json")
    assert json.loads(text)["compact"] and [layer["experts"] for layer in json.loads(text)["layers"]] == [8] * 4
    code, text, _ = run("evaluate", out, "--against", MODEL, "--text", str(ASSETS / "demo-eval.jsonl"), *FEW, "--json")
    assert code == 0 and 0 < json.loads(text)["kl"] < 2
    code, text, err = run("export", out, "-o", vanilla, "--json")
    assert code == 0, err
    assert json.loads((vanilla / "config.json").read_text())["num_local_experts"] == 8
    code, text, _ = run("inspect", vanilla)
    assert code == 0 and "8" in text


def test_an_edited_plan_can_be_fed_back(run, tmp_path):
    out, again = tmp_path / "a", tmp_path / "b"
    merge = ["compress", MODEL, "--method", "m-smoe", "--keep", "0.5"]
    assert run(*merge, "-o", out, "--calibration", TEXT, *FEW)[0] == 0
    code, text, err = run("export", out, "-o", tmp_path / "full", "--duplicate", "--json")
    assert code == 0, err
    assert json.loads(text)["parameters"] == json.loads(run("inspect", MODEL, "--json")[1])["sizes"]["parameters"]
    plan = out / "moepress" / "plan.json"
    code, _, err = run(*merge, "-o", again, "--plan", plan)
    assert code == 0, err
    assert Plan.load(again / "moepress" / "plan.json") == Plan.load(plan)
    assert (out / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()


def test_dry_run_writes_nothing_and_predicts_the_size(run, tmp_path):
    arguments = ["compress", MODEL, "-o", tmp_path / "out", "--keep", "8", "--calibration", TEXT, *FEW, "--json"]
    predicted = json.loads(run(*arguments, "--dry-run")[1])
    assert not (tmp_path / "out").exists() and predicted["seconds"] > 0 and predicted["memory"] > 0
    made = json.loads(run(*arguments)[1])
    assert predicted["bytes_after"] == pytest.approx(made["after"]["bytes"], rel=0.001)


def test_methods_lists_everything(run):
    code, text, _ = run("methods")
    assert code == 0 and all(name in text for name in ("m-smoe", "reap", "router-logits", "weight-matching", "arxiv"))
    assert "m-smoe" in [entry["name"] for entry in json.loads(run("methods", "--json")[1])["method"]]


def test_every_command_is_described_in_one_line(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for group in ([], ["bench"]):
        code, out, _ = run(*group, "--help")
        assert code == 0 and "Commands:" in out and "..." not in out.partition("Commands:")[2], out


def test_a_note_is_not_broken_to_the_width_of_its_table(capsys):
    note = "observe 0.5 s, plan 0.0 s, merge 0.3 s, write 0.1 s"
    print_table("a", ["", "b"], [["c", "d"]], note)
    assert note in capsys.readouterr().out.splitlines()


def test_version_names_what_bug_reports_need(run):
    code, text, _ = run("--version")
    assert code == 0 and all(word in text for word in (moepress.__version__, "torch", "transformers", "Python"))


MISTAKES = {
    "no output": (["compress", MODEL, "--keep", "8", "--calibration", TEXT], "-o FOLDER"),
    "no size": (["compress", MODEL, "-o", "OUT", "--calibration", TEXT], "say how small"),
    "no text": (["compress", MODEL, "-o", "OUT", "--keep", "8"], "calibration text is missing"),
    "zero": (["compress", MODEL, "-o", "OUT", "--keep", "0", "--calibration", TEXT], "keep: must be positive"),
    "too many": (["compress", MODEL, "-o", "OUT", "--keep", "17", "--calibration", TEXT], "more than the 16 experts"),
    "not a number": (["compress", MODEL, "-o", "OUT", "--keep", "many", "--calibration", TEXT], "--keep wants a count"),
    "below top-k": (
        ["compress", MODEL, "-o", "OUT", "--keep", "1", "--format", "vanilla", "--calibration", TEXT],
        "at least 2 must stay",
    ),
    "method": (["compress", MODEL, "-o", "OUT", "--keep", "8", "--method", "msmoe", "--calibration", TEXT], "m-smoe"),
    "set": (["compress", MODEL, "-o", "OUT", "--keep", "8", "--set", "plan.similarity", "--calibration", TEXT], "KEY="),
    "unused knob": (
        ["compress", MODEL, "-o", "OUT", "--keep", "8", "--method", "reap", "--set", "merge.operator=uniform",
         "--calibration", TEXT],
        "does not use 'merge.operator'",
    ),
    "unknown key": (
        ["compress", MODEL, "-o", "OUT", "--keep", "8", "--set", "plan.similarty=random", "--calibration", TEXT],
        "did you mean 'similarity'",
    ),
    "no such model": (
        ["compress", "/no/such/model", "-o", "OUT", "--keep", "8", "--calibration", TEXT], "does not exist",
    ),
    "no such text": (["compress", MODEL, "-o", "OUT", "--keep", "8", "--calibration", "absent.jsonl"], "absent.jsonl"),
    "no such recipe": (
        ["compress", MODEL, "-o", "OUT", "--keep", "8", "--recipe", "absent.yaml", "--calibration", TEXT], "no recipe",
    ),
    "all experts": (
        ["compress", MODEL, "-o", "OUT", "--keep", "16", "--calibration", TEXT], "nothing would be smaller",
    ),
    "larger than it is": (
        ["compress", MODEL, "-o", "OUT", "--target-size", "1GB", "--method", "m-smoe", "--dry-run", "--calibration",
         TEXT],
        "nothing would be smaller",
    ),
    "no such device": (
        ["compress", MODEL, "-o", "OUT", "--keep", "8", "--device", "cdua", "--calibration", TEXT], "use cpu or cuda",
    ),
    "nothing to export": (["export", MODEL, "-o", "OUT"], "not a compact checkpoint"),
    "text and task": (["evaluate", MODEL], "either text or a task"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_sentence_and_write_nothing(run, tmp_path, monkeypatch, mistake):
    monkeypatch.chdir(tmp_path)
    arguments, expected = MISTAKES[mistake]
    code, out, err = run(*arguments)
    assert code == 2 and expected in err and err.count("\n") == 1 and out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content, expected",
    [("", "empty"), ('{"text": "too short"}\n', "tokens"), ("{\n", "line 1"), ('{"txt": "x"}\n', "text")],
)
def test_calibration_that_cannot_be_used(run, tmp_path, content, expected):
    (tmp_path / "text.jsonl").write_text(content)
    code, _, err = run(
        "compress", MODEL, "-o", tmp_path / "out", "--keep", "8", "--calibration", tmp_path / "text.jsonl"
    )
    assert code == 2 and expected in err and not (tmp_path / "out").exists()


def test_text_needs_a_tokenizer(run, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("tokenizer*"))
    code, _, err = run("compress", model, "-o", tmp_path / "out", "--keep", "8", "--calibration", TEXT, *FEW)
    assert code == 2 and "no tokenizer" in err


def test_an_existing_folder_is_not_overwritten_unasked(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("keep me")
    arguments = ["compress", MODEL, "-o", out, "--keep", "8", "--calibration", TEXT, *FEW]
    code, _, err = run(*arguments)
    assert code == 2 and "overwrite" in err and (out / "precious.txt").exists()
    assert run(*arguments, "--overwrite")[0] == 0
    assert (out / "config.json").exists() and not (out / "precious.txt").exists()


@pytest.mark.parametrize("damage", ["truncated", "no weights", "no config", "not json", "dense"])
def test_damaged_models_are_refused(run, tmp_path, damage):
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    weights = model / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "no weights":
        weights.unlink()
    elif damage == "no config":
        (model / "config.json").unlink()
    elif damage == "not json":
        (model / "config.json").write_text("{")
    else:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        shutil.rmtree(model)
        config = Qwen3Config(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                             num_attention_heads=2, num_key_value_heads=1, head_dim=8)  # fmt: skip
        Qwen3ForCausalLM(config).save_pretrained(model)
    code, _, err = run("compress", model, "-o", tmp_path / "out", "--keep", "8", "--calibration", TEXT)
    assert code == 2 and err.startswith("moepress: ") and err.count("\n") == 1
    assert damage != "dense" or "dense" in err
    assert not (tmp_path / "out").exists()


def test_interrupting_leaves_nothing_behind(tmp_path):
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "moepress",
        "compress",
        MODEL,
        "-o",
        str(out),
        "--keep",
        "8",
        "--calibration",
        TEXT,
    ]
    # A shell's background jobs ignore SIGINT and hand that down: this process must not.
    listens = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=listens)
    deadline = time.time() + 120
    while not any(tmp_path.iterdir()) and process.poll() is None and time.time() < deadline:
        time.sleep(0.05)  # until the partial folder is there
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "interrupted" in err and "Traceback" not in err
    assert not out.exists() and list(tmp_path.iterdir()) == []


def test_demo(run, tmp_path):
    code, text, err = run("demo", "-o", tmp_path / "demo", "--json")
    assert code == 0, err
    shown = json.loads(text)
    original, compact, vanilla = shown["rows"]
    assert (compact["name"], vanilla["name"]) == ("m-smoe, compact", "auto, vanilla")
    assert compact["bytes"] < 0.7 * original["bytes"] and vanilla["bytes"] < 0.7 * original["bytes"]
    assert original["perplexity"] < compact["perplexity"] < 3 * original["perplexity"]
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 5000


def test_a_dry_run_refuses_what_the_run_would(run, tmp_path):
    given = ["compress", MODEL, "--keep", "8", "--calibration", TEXT, *FEW, "--dry-run"]
    code, _, err = run(*given, "-o", tmp_path / "out", "--memory", "10MB")
    assert code == 2 and "may use 10 MB" in err
    code, _, err = run(*given, "-o", MODEL, "--overwrite")
    assert code == 2 and "is the input folder" in err
    code, text, _ = run(*given, "-o", tmp_path / "out", "--memory", "8GB", "--json")
    assert code == 0 and 0 < json.loads(text)["memory"] <= 8e9 and not list(tmp_path.iterdir())


def test_only_the_original_gets_into_the_records(run, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    assert run("compress", MODEL, "-o", out, "--method", "reap", "--keep", "8", "--calibration", TEXT, *FEW)[0] == 0
    assert run("compress", MODEL, "-o", other, "--method", "reap", "--keep", "4", "--format", "vanilla",
               "--calibration", TEXT, *FEW)[0] == 0  # fmt: skip
    compare = ["evaluate", out, "--text", TEXT, "--samples", "2", "--length", "64", "--against"]
    code, _, err = run(*compare, other)
    assert code == 2 and "--no-record" in err and not (out / "moepress" / "evaluation.json").exists()
    assert run(*compare, other, "--no-record")[0] == 0
    code, text, _ = run(*compare, MODEL)
    assert code == 0 and "Added to" in text


def test_an_even_output_says_that_it_can_be_exported(run, tmp_path):
    given = ["compress", MODEL, "--keep", "8", "--calibration", TEXT, *FEW]
    assert "moepress export" in run(*given, "-o", tmp_path / "rows", "--method", "reap")[1]
    assert "moepress export" not in run(*given, "-o", tmp_path / "map", "--method", "m-smoe")[1]
