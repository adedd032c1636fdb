"""Runs the other programs where they are there; a test that needs an absent one is skipped and says what is absent."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
Answers = list[list[list[int]]]


def answers_of(command: list[str | Path], folders: list[Path], prompts: list[list[int]], new: int) -> Answers:
    """What a program generates from each folder after each prompt; it reads a job and writes JSON."""
    return json.loads(run(command, {"folders": folders, "prompts": prompts, "new": new}))


def run(command: list[Any], job: dict[str, Any] | None = None, path: bool = False) -> str:
    """Its output, given a job as JSON. Without `path`, nothing of this one's PYTHONPATH can be imported there."""
    environment = {name: value for name, value in os.environ.items() if path or name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        input=json.dumps(job, default=str),
        capture_output=True,
        text=True,
        timeout=900,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-5000:]
    return done.stdout


def python_with(package: str, variable: str) -> str:
    """An interpreter that has the package: the one that the variable names, or this one."""
    named = os.environ.get(variable)
    if named:
        return named
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed here, and {variable} names no Python that has it")
    return sys.executable


def folder_with(file: str, variable: str, what: str) -> Path:
    place = os.environ.get(variable)
    if not place or not Path(place, file).exists():
        pytest.skip(f"{variable} names no folder with {file} ({what})")
    return Path(place)
