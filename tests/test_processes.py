"""Several processes compress a model together: the same files as one, and one sentence when something goes wrong."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moepress
from moepress.errors import MoepressError
from moepress.exact import rounded, rounder
from moepress.fit import check_shared
from moepress.plan.saliency.elimination import Elimination
from moepress.recipe import make_recipe
from moepress.team import Team

from .ranks import Dying, run_rank
from .squeeze import build, silent  # noqa: F401
from .test_resume import CLEAN, files_of
from .test_streaming import windows

Arguments = list[str]
TIMEOUT = 120.0
ENDED = 2
"""The exit status of a process that ends with a sentence."""


def prepare(folder: Path, family: str = "qwen3_moe") -> Arguments:
    """A model and text, and what all runs on them have in common."""
    model = build(family).to(torch.bfloat16)
    if model.config.is_encoder_decoder:
        model.config.decoder_start_token_id = model.config.pad_token_id
    model.save_pretrained(folder / "model")
    text = windows(folder)
    return ["compress", str(folder / "model"), "--keep", "0.5", "--calibration", text, "--batch-size", "2"]


def free_port() -> int:
    """One that the system does not give to whoever asks for any port: it would be taken before it is used."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Group:
    """Processes that run `moepress ARGUMENTS`, as torchrun would start them, but nothing has to be imported again."""

    def __init__(self, folder: Path, ranks: list[Arguments], before: Callable[[int], None] | None = None) -> None:
        self.folder, self.size = folder, len(ranks)
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(self.size)}
        self.children = [
            CLEAN.Process(target=run_rank, args=(rank, group, folder, arguments, before))
            for rank, arguments in enumerate(ranks)
        ]
        for child in self.children:
            child.start()

    def wait(self) -> list[int]:
        """The exit statuses; negative ones are signals. All must end in time."""
        end = time.monotonic() + TIMEOUT
        for child in self.children:
            child.join(max(0.0, end - time.monotonic()))
        late = [child for child in self.children if child.exitcode is None]
        for child in late:
            child.kill()
            child.join()
        assert not late, f"{len(late)} processes did not end\n{self.said()}"
        return [child.exitcode or 0 for child in self.children]

    def said(self) -> str:
        return "".join((self.folder / f"{rank}.err").read_text() for rank in range(self.size))


def together(folder: Path, size: int, arguments: Arguments, out: str = "together") -> Path:
    """The output of some processes that all end well."""
    group = Group(folder, [[*arguments, "-o", str(folder / out)]] * size)
    assert group.wait() == [0] * size, group.said()
    return folder / out


def alone(folder: Path, arguments: Arguments) -> Path:
    group = Group(folder, [[*arguments, "-o", str(folder / "alone")]])
    assert group.wait() == [0], group.said()
    return folder / "alone"


def method(name: str, *more: str) -> Arguments:
    return ["--method", name, *(part for entry in more for part in ("--set", entry))]


SOLVED_IN_TURN = "refit.method={name: least-squares, joint_units: 1}"
CASES: dict[str, tuple[str, Arguments, int]] = {
    "auto": ("qwen3_moe", method("auto"), 2),
    "router groups": ("deepseek_v3", ["--keep", "0.75", *method("auto")], 3),
    "more processes than batches": ("qwen3_moe", [*method("prune-refit"), "--batch-size", "8"], 3),
    "solved in turn": ("qwen3_moe", method("prune-refit", SOLVED_IN_TURN), 3),
    "layers apart": ("qwen3_moe", method("m-smoe"), 3),
    "activations, router rows": ("gpt_oss", method("ream", "refit.router=mass"), 2),
}
MORE: dict[str, tuple[str, Arguments, int]] = {
    **{name: ("qwen3_moe", method(name), 2) for name in ("reap", "frequency-pruning", "prune-refit", "averaging")},
    **{name: ("qwen3_moe", method(name), 3) for name in ("git-rebasin", "repair", "zipit", "task-specific")},
    **{name: ("qwen3_moe", method(name), 3) for name in ("auto", "merge-moe", "hc-smoe", "reap-all", "ream")},
    "paper": ("qwen3_moe", [*method("m-smoe"), "--preset", "paper"], 2),
    "vanilla": ("qwen3_moe", [*method("reap-all"), "--format", "vanilla"], 2),
    "encoder and decoder": ("switch_transformers", method("auto", "plan.skip=none"), 2),
    "activations": ("switch_transformers", method("m-smoe", "align.method=activation-matching"), 3),
    "elimination first": ("qwen3_moe", method("auto", "sequential=false", "plan.budget=overall"), 2),
}


def check_same(case: tuple[str, Arguments, int], folder: Path) -> None:
    family, options, size = case
    arguments = [*prepare(folder, family), *options]
    assert files_of(alone(folder, arguments)) == files_of(together(folder, size, arguments))
    assert moepress.verify(folder / "together").whole
    assert not list(folder.glob(".together.*"))


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_same_files_as_one_process(case: Any, tmp_path: Path) -> None:
    check_same(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE.values(), ids=list(MORE))
def test_the_same_files_by_every_method(case: Any, tmp_path: Path) -> None:
    check_same(case, tmp_path)


def check_death(group: Group, victim: int) -> None:
    """All have ended, with one sentence that says whose death it was."""
    statuses = group.wait()
    assert statuses.pop(victim) == -signal.SIGKILL
    assert statuses == [ENDED] * len(statuses), group.said()
    sentences = [line for line in group.said().splitlines() if line.startswith("moepress:")]
    name = rf"rank {victim} of {group.size} \(process {group.children[victim].pid} on [^ ]+\)"
    assert len(sentences) == 1 and re.match(f"moepress: {name} died, .*--resume goes on$", sentences[0]), group.said()


@pytest.mark.parametrize(
    "name, victim, layer, size",
    [("prune-refit", 0, 1, 2), ("prune-refit", 1, 1, 3), pytest.param("m-smoe", 1, 0, 3, marks=pytest.mark.slow)],
)
def test_a_death_ends_all_and_the_run_goes_on(name: str, victim: int, layer: int, size: int, tmp_path: Path) -> None:
    arguments = [*prepare(tmp_path), *method(name)]
    expected = files_of(alone(tmp_path, arguments))
    group = Group(tmp_path, [[*arguments, "-o", str(tmp_path / "together")]] * size, Dying(victim, layer))
    check_death(group, victim)
    assert not (tmp_path / "together").exists()
    # With another number of processes: it makes no difference.
    assert files_of(together(tmp_path, 5 - size, [*arguments, "--resume"])) == expected


@pytest.mark.slow
def test_ten_deaths(tmp_path: Path) -> None:
    """At any moment once they have met."""
    arguments = [*prepare(tmp_path), *method("prune-refit")]
    expected = files_of(alone(tmp_path, arguments))
    draw = random.Random(0)
    died, attempt = 0, 0
    while died < 10:
        attempt += 1
        out, victim = tmp_path / f"out-{attempt}", draw.randrange(3)
        group = Group(tmp_path, [[*arguments, "-o", str(out), "--resume"]] * 3)
        while not list(tmp_path.glob(f".{out.name}.partial-*")):
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 1.5))
        group.children[victim].kill()
        if group.wait()[victim] == -signal.SIGKILL and not out.exists():
            died += 1
            assert "died" in group.said()
            together(tmp_path, 2, [*arguments, "--resume"], out.name)
        else:
            moepress.write_report(out)  # which may have been killed while it was drawn: all else was complete
        assert files_of(out) == expected


def broken(folder: Path, first: Arguments, second: Arguments) -> str:
    """What is said when the second of two processes is started otherwise."""
    out = ["-o", str(folder / "together")]
    group = Group(folder, [[*first, *out], [*second, *out]])
    assert group.wait() == [ENDED] * 2, group.said()
    assert not (folder / "together").exists() and not list(folder.glob(".together.*/journal/finished-*"))
    (sentence,) = [line for line in group.said().splitlines() if line.startswith("moepress:")]
    return sentence


def test_processes_that_do_different_things_are_refused(tmp_path: Path) -> None:
    first = [*prepare(tmp_path), *method("prune-refit")]
    assert "rank 1 of 2 has another recipe than rank 0" in broken(tmp_path, first, [*first, "--keep", "0.25"])
    (tmp_path / "other").mkdir()
    build("qwen3_moe", seed=1).save_pretrained(tmp_path / "other" / "model")
    other = [str(tmp_path / "other" / "model") if part == str(tmp_path / "model") else part for part in first]
    assert "rank 1 of 2 has another model than rank 0" in broken(tmp_path, first, other)
    said = broken(tmp_path, first, [*first, "--plan", str(tmp_path / "nowhere.json")])
    assert re.search(r"rank 1 of 2 \(process \d+ on .*\): .*nowhere.json", said), said


def test_what_needs_the_whole_model_is_done_by_one_process(tmp_path: Path) -> None:
    fisher = [*prepare(tmp_path), *method("fisher")]
    assert "needs the whole model in memory (gradients, decomposition) is done by one" in broken(
        tmp_path, fisher, fisher
    )


def test_torchrun(tmp_path: Path) -> None:
    arguments = [*prepare(tmp_path), *method("prune-refit")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "moepress"]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    ended = subprocess.run(
        [*command, *arguments, "-o", tmp_path / "together"],
        env=environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        timeout=TIMEOUT,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Load it:") == 1  # one of them speaks
    assert files_of(tmp_path / "together") == files_of(alone(tmp_path, arguments))


class Member(Team):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@given(st.integers(1, 200), st.integers(1, 40))
def test_every_batch_is_the_share_of_one(count: int, size: int) -> None:
    shares = [Member(rank, size).share(count) for rank in range(size)]
    assert [i for share in shares for i in share] == list(range(count))
    assert 0 in shares[0]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.floats(-30, 30))
def test_rounded_products_add_up_the_same_in_any_order(seed: int, count: int, scale: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    size = 10 ** (scale + 4 * torch.rand(count, 1, generator=draw))  # of very different sizes
    products = (torch.randn(count, 7, generator=draw) * size).float()
    by = rounder(float(products.abs().double().sum(0).max()))

    def total(order: list[int], parts: int) -> torch.Tensor:
        sums = [torch.zeros(7, dtype=torch.float64) for _ in range(parts)]
        for at, i in enumerate(order):
            sums[at % parts] += rounded(products[i], by)
        return torch.stack(sums).sum(0)

    first = total(list(range(count)), 1)
    assert torch.equal(first, total(torch.randperm(count, generator=draw).tolist(), 3))
    true = products.double().sum(0)
    assert bool(((first - true).abs() <= 1e-13 * products.abs().double().sum(0).max()).all())


def test_what_does_not_know_how_to_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe({"method": "auto", "keep": 4})
    check_shared(recipe, False, Member(0, 2))
    monkeypatch.setattr(Elimination, "shared", False)
    check_shared(recipe, False, Team())
    with pytest.raises(MoepressError, match="'elimination' does not know how to share its work among 2 processes"):
        check_shared(recipe, False, Member(0, 2))
