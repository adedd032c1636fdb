"""A training run on disk, so that one that was killed goes on where its last saved state stands."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moepress.errors import MoepressError
from moepress.recovery.hook import TrainingHook
from moepress.recovery.options import RecoverReport
from moepress.recovery.parameters import Kept

ASKED, BEST = "asked.json", "best.pt"


class Progress:
    """What a run knows beside its weights."""

    def __init__(self) -> None:
        self.step = 0
        self.report = RecoverReport()
        self.best_loss = float("inf")
        self.waited = 0
        """Looks at held-out samples since the last improvement."""

    def state_dict(self) -> dict[str, Any]:
        return self.__dict__ | {"report": dict(self.report.__dict__)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"report": RecoverReport(**state["report"])})


class SavedState:
    """One folder for one run: what was asked for, and the newest state."""

    def __init__(
        self, folder: Path, asked: dict[str, Any], accelerator: Any, progress: Progress, hooks: Sequence[TrainingHook]
    ) -> None:
        self.folder, self.accelerator, self.progress = folder, accelerator, progress
        self.asked = json.loads(json.dumps(asked | {"processes": accelerator.num_processes}))
        for part in (progress, *hooks):
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise MoepressError(f"{type(part).__name__} has no state_dict, so that training cannot go on with it")
            accelerator.register_for_checkpointing(part)

    @property
    def best_file(self) -> str:
        """Of split weights, every process keeps its own part."""
        return f"{self.accelerator.process_index}-{BEST}" if self.accelerator.is_fsdp2 else BEST

    def begin(self, resume: bool, best: Kept) -> None:
        """Load the newest state, if there is one and `resume` says so; otherwise claim the folder."""
        newest = check_state(self.folder, self.asked, resume)
        self.accelerator.wait_for_everyone()
        if newest is not None:
            self.accelerator.load_state(str(newest))
            file = newest / self.best_file
            if file.exists():
                best.save()
                for copy, saved in zip(best.copies or [], torch.load(file, weights_only=True), strict=True):
                    copy.copy_(saved)
        elif self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / ASKED).write_text(json.dumps(self.asked, indent=1))
        self.accelerator.wait_for_everyone()

    def save(self, best: Kept) -> None:
        """Beside the old state, which goes when the new one is whole."""
        final = self.folder / f"step-{self.progress.step:08d}"
        partial = final.with_suffix(".partial")
        if self.accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(partial))
        if best.copies is not None and (self.accelerator.is_main_process or self.accelerator.is_fsdp2):
            torch.save(best.copies, partial / self.best_file)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            for file in partial.rglob("*"):
                if file.is_file():
                    with open(file, "rb") as stream:
                        os.fsync(stream.fileno())
            os.replace(partial, final)
            for old in states(self.folder):
                if old != final:
                    shutil.rmtree(old, ignore_errors=True)
        self.accelerator.wait_for_everyone()


def states(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".partial")


def check_state(folder: Path, asked: dict[str, Any] | None, resume: bool) -> Path | None:
    """The newest state of an interrupted run. Raises if there is one and it is not wanted, or is of another run."""
    file = folder / ASKED
    if not file.is_file():
        if states(folder):
            raise MoepressError(f"{folder} holds states of a training run, but not what it was asked for: remove it")
        return None
    if not resume:
        raise MoepressError(f"{folder} holds an interrupted run: go on with it (resume), or remove that folder")
    before = json.loads(file.read_text())
    if asked is not None and (other := [name for name in asked | before if asked.get(name) != before.get(name)]):
        name = other[0]
        raise MoepressError(
            f"the run in {folder} was started with {name}={before.get(name)!r}, not {asked.get(name)!r}: "
            "repeat what was asked then, or remove that folder to start again"
        )
    return next(reversed(states(folder)), None)
