"""Training that splits the student over two processes (FSDP2, gloo) ends where one process ends."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")

import moepress
from moepress.checkpoint.load import load_model
from moepress.errors import MoepressError

from .sharded_run import FSDP, files, trained
from .test_training import environment, free_port

CLOSE = {"rtol": 1e-3, "atol": 1e-4}
"""fp32, and gradients that are added up in another order, through Adam, which divides by their size."""


def launched(folder, cases, environ=FSDP, code=0):
    """What two processes say to the cases, by rank."""
    torch.save(cases, folder / "cases.pt")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
              "--master_addr", "127.0.0.1", "--master_port", str(free_port()),
              "-m", "tests.sharded_run", str(folder)]  # fmt: skip
    root = Path(__file__).parents[1]
    ended = subprocess.run(launch, env=environment() | environ, capture_output=True, timeout=240, cwd=root)
    assert ended.returncode == code, ended.stderr.decode()[-6000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def same_run(found, expected):
    assert found["report"]["loss"] == pytest.approx(expected["report"]["loss"], rel=1e-5)
    held = [[loss for _, loss in run["report"]["held_out"]] for run in (found, expected)]
    assert held[0] == pytest.approx(held[1], rel=1e-5) and held[0]
    assert found["report"]["best"] == expected["report"]["best"]
    assert found["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, **CLOSE, msg=name)


CASES = {
    "plain": {},
    "compact, experts only": {"form": "compact", "train": "experts", "accumulate": 2},
}
MORE = {
    "compact": {"form": "compact"},
    "factored": {"form": "factored"},
    "jetmoe": {"family": "jetmoe"},
    "tied": {"form": "tied"},
    "checkpointing": {"checkpointing": True},
    "stops early": {"steps": 12, "lr": 0.3, "patience": 1, "evaluate_every": 1},
    "cache": {"cache": 8},
    "gpt_oss": {"family": "gpt_oss", "form": "compact"},
    "mixtral": {"family": "mixtral", "form": "compact"},
}


APART = {"family": "fairseq_moe", "batch_size": 2, "steps": 2}
"""Experts of a module each, and one sample a step for a process, which some of them get no token of."""


def both(tmp_path_factory, cases):
    return launched(tmp_path_factory.mktemp("sharded"), {name: ("trained", how) for name, how in cases.items()})


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return both(tmp_path_factory, CASES | {"apart": APART})


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    return both(tmp_path_factory, MORE)


def check(found, how):
    expected = trained(**how)
    for run in found:
        same_run(run, expected)
        assert 0.35 < run["part"][0] < 0.65
    assert not expected["part"]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one(found, name):
    check([said[name] for said in found], CASES[name])


def test_experts_that_no_token_of_a_process_reached(found):
    """They get a gradient of zero. Without one the processes would add up different tensors, and end with an error."""
    expected = trained(**APART)["report"]["loss"]
    for said in found:
        loss = said["apart"]["report"]["loss"]
        assert loss[0] == pytest.approx(expected[0], rel=1e-5)
        assert loss[1] == pytest.approx(expected[1], rel=0.05)  # weight decay moves also what nobody reached


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_two_processes_equal_one_in_other_forms(more, name):
    check([said[name] for said in more], MORE[name])


@pytest.mark.slow
def test_bf16(tmp_path):
    """In the forward pass, and as what the weights are stored in."""
    cases = {"pass": {"mixed_precision": "bf16"}, "stored": {"form": "narrow"}}
    (said, _) = launched(tmp_path, {name: ("trained", how) for name, how in cases.items()})
    wide, expected = trained(), {name: trained(**how) for name, how in cases.items()}
    assert said["pass"]["report"]["loss"] == pytest.approx(expected["pass"]["report"]["loss"], rel=0.1)
    assert said["pass"]["report"]["loss"] != pytest.approx(wide["report"]["loss"], rel=1e-5)
    assert said["stored"]["report"]["loss"] == pytest.approx(expected["stored"]["report"]["loss"], rel=1e-5)
    for name in ("pass", "stored"):
        kinds = [{key: tensor.dtype for key, tensor in run[name]["weights"].items()} for run in (said, expected)]
        assert kinds[0] == kinds[1]
    for name, tensor in expected["stored"]["weights"].items():  # the last bit may round the other way
        torch.testing.assert_close(said["stored"]["weights"][name], tensor, rtol=2**-7, atol=1e-3, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_run_that_was_broken_off_ends_the_same(tmp_path, kind):
    cases = {
        "whole": ("trained", {"steps": 6}),
        "again": ("trained", {"steps": 6, "stop_at": 3, "state": str(tmp_path / "state")}),
    }
    for said in launched(tmp_path, cases, FSDP | {"FSDP_STATE_DICT_TYPE": kind}):
        assert said["again"]["report"] == said["whole"]["report"]
        for name, tensor in said["whole"]["weights"].items():
            assert tensor.equal(said["again"]["weights"][name]), name
    with pytest.raises(MoepressError, match="was started with"):
        trained(state=tmp_path / "state", steps=6, resume=True)


@pytest.mark.slow
def test_what_is_written(tmp_path):
    assets = Path(moepress.__file__).parent / "assets"
    source, text = str(tmp_path / "model"), str(assets / "demo-text.jsonl")
    moepress.compress(
        str(assets / "demo-moe"), source, method="m-smoe", keep=8, calibration=text,
        **{"calibration.samples": 8, "calibration.length": 64},
    )  # fmt: skip
    how = {"source": source, "teacher": str(assets / "demo-moe"), "text": text}
    (said, _) = launched(tmp_path, {"files": ("files", how | {"out": str(tmp_path / "two")})})
    expected = files(**how, out=str(tmp_path / "one"))
    assert said["files"]["report"]["loss"] == pytest.approx(expected["report"]["loss"], rel=0.02)  # of bf16 weights
    one, two = load_model(tmp_path / "one"), load_model(tmp_path / "two")
    for (name, tensor), other in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        assert tensor.dtype == other.dtype
        torch.testing.assert_close(other.float(), tensor.float(), rtol=2**-7, atol=1e-3, msg=name)
    names = [{str(p.relative_to(tmp_path / n)) for p in (tmp_path / n).rglob("*")} for n in ("one", "two")]
    assert names[0] == names[1] and moepress.verify(tmp_path / "two").whole
    assert not list(tmp_path.glob(".two*"))


@pytest.mark.slow
def test_what_is_refused(tmp_path):
    for said in launched(tmp_path, {"refused": ("refused", {})}):
        hook, fp16, tied, different = said["refused"]
        assert hook.startswith("Hook needs whole weights in every process")
        assert "no fp16" in fp16
        assert "'shared.weight', which more modules share" in tied
        assert "different weights of the student" in different
