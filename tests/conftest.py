"""Settings and fixtures that all tests share."""

from __future__ import annotations

import os

# Before anything imports huggingface_hub: tests never touch the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)

FIXTURES = Path(os.environ.get("MOEPRESS_FIXTURES", Path(__file__).parents[1].parent / "shared"))
ABSENT = "the test fixtures are absent"
_absent: set[str] = set()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes; run with -m slow")


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of small trained models and their data ($MOEPRESS_FIXTURES, by default ../shared)."""
    if not (FIXTURES / "models").is_dir():
        pytest.skip(f"{ABSENT}: there is no folder {FIXTURES / 'models'} (set MOEPRESS_FIXTURES)")
    return FIXTURES


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: (exit code, what it printed, what it said on the error stream)."""
    from moepress.cli import main

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moepress", *map(str, arguments)])
        capsys.readouterr()  # what the test itself printed
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple) and ABSENT in report.longrepr[2]:
        _absent.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    # On a build server a green run must mean that everything ran.
    if _absent and os.environ.get("CI", "").lower() == "true" and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _absent:
        failing = " (a failure, because CI=true)" if os.environ.get("CI", "").lower() == "true" else ""
        terminalreporter.write_line(f"{len(_absent)} tests skipped because {ABSENT}{failing}", yellow=True)


@pytest.fixture(scope="session")
def word_tokenizer() -> Any:
    """A tokenizer of 96 ids like the models of `zoo`: pad 0, bos 1, eos 2, the words w3 to w95; it adds no eos."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 96)}}
    core = Tokenizer(WordLevel(words, unk_token="w3"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
