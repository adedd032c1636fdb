"""What goes to the Hub and comes from it, against a stub on this machine; every refusal is one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import moepress
from moepress.checkpoint.load import load_model
from moepress.checkpoint.manifest import CARD
from moepress.errors import MoepressError
from tests.clients.models import ASSETS, DEMO
from tests.squeeze import assert_same_files, silent  # noqa: F401
from tests.stub_hub import Hub, Repository, address, stub_hub  # noqa: F401

TEXT = str(ASSETS / "demo-text.jsonl")
FEW = ["--samples", "4", "--length", "64"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moepress.api.draw_report", lambda records: records / "report.html")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    few = {"calibration.samples": 4, "calibration.length": 64}
    moepress.compress(DEMO, out, method="m-smoe", keep=0.5, calibration=TEXT, **few)  # type: ignore[arg-type]
    return out


@pytest.fixture
def output(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "out"))


@pytest.fixture
def logged_in(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setenv("HF_TOKEN", "good")
    return hub


# ---- uploads ---------------------------------------------------------------------------------------------------------


def test_push_and_load_from_there(logged_in: Hub, output: Path, tmp_path: Path) -> None:
    assert moepress.push(output, "me/small") == f"{logged_in.address}/me/small"
    repository = logged_in.repositories["me/small"]
    files = repository.branches["main"]
    expected = {file.relative_to(output).as_posix() for file in output.rglob("*") if file.is_file()}
    assert set(files) == expected and "moepress/manifest.json" in files
    assert len(repository.commits) == 1 and not repository.private
    assert b'from_pretrained("me/small")' in files[CARD]

    loaded = load_model("me/small")  # a download, through the same stub
    assert loaded.config.quantization_config.layers
    cached = next((tmp_path / "cache").glob("models--me--small/snapshots/*"))
    assert (cached / "model.safetensors").read_bytes() == (output / "model.safetensors").read_bytes()
    assert moepress.inspect_model("me/small").compact
    assert moepress.verify(shutil.copytree(cached, tmp_path / "copy")).whole


def test_a_compact_output_on_the_hub_is_exported(logged_in: Hub, output: Path, tmp_path: Path) -> None:
    """With the records and the card that it has there."""
    moepress.push(output, "me/small")
    moepress.export("me/small", tmp_path / "full", duplicate=True)
    card = (tmp_path / "full" / CARD).read_text()
    assert "`demo-moe`, made smaller by" in card and "no smaller" in card and "base_model: me/small" in card
    assert moepress.verify(tmp_path / "full").whole


def test_a_later_upload_leaves_no_old_weights(logged_in: Hub, output: Path) -> None:
    moepress.push(output, "me/small")
    files = logged_in.repositories["me/small"].branches["main"]
    files["model-00001-of-00002.safetensors"] = b"old"
    files["model.safetensors.index.json"] = b"{}"
    files["picture.png"] = b"mine"
    moepress.push(output, "me/small")
    files = logged_in.repositories["me/small"].branches["main"]
    assert "picture.png" in files and "model.safetensors" in files
    assert not {"model-00001-of-00002.safetensors", "model.safetensors.index.json"} & set(files)


def test_private_and_a_branch(logged_in: Hub, output: Path) -> None:
    moepress.push(output, "me/hidden", private=True, revision="v2")
    repository = logged_in.repositories["me/hidden"]
    assert repository.private and not repository.branches["main"] and "config.json" in repository.branches["v2"]
    assert load_model("me/hidden", revision="v2").config.num_hidden_layers == 4
    moepress.push(output, "me/hidden")  # it is there already, and stays private
    assert repository.private and "config.json" in repository.branches["main"]


def test_what_is_public_is_not_taken_for_private(logged_in: Hub, output: Path) -> None:
    logged_in.repositories["me/known"] = Repository()
    with pytest.raises(MoepressError, match="me/known is there already and is public"):
        moepress.push(output, "me/known", private=True)
    assert not logged_in.repositories["me/known"].branches["main"]


def test_only_what_is_whole(logged_in: Hub, output: Path) -> None:
    with (output / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\x55")
    with pytest.raises(MoepressError, match="nothing was uploaded, since .* model.safetensors was changed"):
        moepress.push(output, "me/small")
    assert not logged_in.repositories
    (output / "moepress" / "manifest.json").unlink()
    with pytest.raises(MoepressError, match="has no manifest"):
        moepress.push(output, "me/small")


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "nobody": ({"token": None}, "the Hub wants to know who you are: log in with `hf auth login`, or set HF_TOKEN"),
    "a wrong token": ({"token": "wrong"}, "the Hub does not accept the token that it was given: log in"),
    "a token that reads": ({"token": "weak"}, "the token of me may only read"),
    "somebody else": ({"repo": "them/small"}, "does not let you write to them/small: You don't have the rights"),
    "no name": ({"repo": "a/b/c"}, "'a/b/c' is no name of a model on the Hub: such a name is USER/MODEL"),
    "an error there": ({"broken": "/commit/"}, "the Hub refused with 500: the stub is broken"),
    "uploads break": ({"broken": "/large/"}, "the Hub refused with 500: the stub is broken"),
    "nobody there": ({"address": "http://127.0.0.1:9"}, "the Hub cannot be reached (ConnectionRefusedError"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_sentence_and_the_output_is_kept(
    mistake: str, logged_in: Hub, output: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, expected = MISTAKES[mistake]
    if "token" in told:
        monkeypatch.delenv("HF_TOKEN") if told["token"] is None else monkeypatch.setenv("HF_TOKEN", told["token"])
    logged_in.broken = told.get("broken", "")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # between attempts
    if "address" in told:
        address(monkeypatch, told["address"])
    before = sorted(output.rglob("*"))
    repo = told.get("repo", "me/small")
    code, out, err = run("push", output, repo)
    assert code == 2 and expected in err and out == ""
    assert err.count("\n") == 1 and f"{output} is kept, and `moepress push {output} {repo}` tries again" in err
    assert sorted(output.rglob("*")) == before and moepress.verify(output).whole
    assert all(not one.branches["main"] for one in logged_in.repositories.values())


def test_compress_and_push(logged_in: Hub, run: Run, tmp_path: Path) -> None:
    arguments = ["compress", DEMO, "-o", tmp_path / "out", "--method", "reap-all", "--keep", "8", "--calibration", TEXT]
    code, text, err = run(*arguments, *FEW, "--push", "me/small", "--private", "--json")
    assert code == 0, err
    assert json.loads(text)["address"].endswith("/me/small") and logged_in.repositories["me/small"].private
    assert "config.json" in logged_in.repositories["me/small"].branches["main"]


def test_a_token_is_tried_before_the_work(hub: Hub, run: Run, tmp_path: Path) -> None:
    arguments = ["compress", DEMO, "-o", tmp_path / "out", "--keep", "8", "--calibration", TEXT, *FEW]
    code, _, err = run(*arguments, "--push", "me/small")
    assert code == 2 and "who you are" in err and not (tmp_path / "out").exists()
    code, _, err = run(*arguments, "--private")
    assert code == 2 and "--private is about --push" in err


# ---- wrong names -----------------------------------------------------------------------------------------------------

NAMES: dict[str, tuple[str, str]] = {
    "unknown": ("me/absent", "me/absent is no folder here, and the Hub has no model me/absent, or it is private"),
    "gated": ("me/gated", "me/gated asks for its terms to be accepted"),
    "impossible": ("no--such..model", "is no name of a model on the Hub"),
}
OUT = ["-o", "OUT", "--keep", "8", "--calibration", TEXT]
COMMANDS: dict[str, list[str]] = {
    "inspect": ["inspect", "NAME"],
    "compress": ["compress", "NAME", *OUT],
    "dry run": ["compress", "NAME", *OUT, "--dry-run"],
    "evaluate": ["evaluate", "NAME", "--text", TEXT],
    "against": ["evaluate", str(DEMO), "--against", "NAME", "--text", TEXT],
    "recover": ["recover", "NAME", "-o", "OUT", "--data", TEXT, "--teacher", str(DEMO)],
    "teacher": ["recover", str(DEMO), "-o", "OUT", "--data", TEXT, "--teacher", "NAME"],
    "finetune": ["finetune", "NAME", "-o", "OUT", "--task", "sst2"],
    "export": ["export", "NAME", "-o", "OUT"],
    "compare": ["compare", "NAME", "-o", "OUT", "--calibration", TEXT, "--text", TEXT, "--methods", "reap"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_name_is_one_sentence(
    name: str,
    command: str,
    hub: Hub,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.repositories["me/gated"] = Repository(gated=True)
    monkeypatch.chdir(tmp_path)
    given, expected = NAMES[name]
    code, out, err = run(*[given if word == "NAME" else word for word in COMMANDS[command]])
    assert code == 2 and expected in err, err
    assert err.count("\n") == 1 and "Client Error" not in err and out == ""
    assert not (tmp_path / "OUT").exists()


def test_a_wrong_revision(logged_in: Hub, output: Path, run: Run) -> None:
    moepress.push(output, "me/small")
    code, _, err = run("compress", "me/small", "--revision", "v9", *OUT)
    assert code == 2 and "me/small has no revision 'v9' on the Hub" in err


def test_without_a_network(hub: Hub, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    address(monkeypatch, "http://127.0.0.1:9")
    assert "the Hub cannot be reached (ConnectionRefusedError" in run("inspect", "me/model")[2]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "the Hub is not asked for me/model, since HF_HUB_OFFLINE is set" in run("inspect", "me/model")[2]
