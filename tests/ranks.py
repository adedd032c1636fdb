"""What runs in one of several processes that compress a model together."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


def run_rank(
    rank: int, group: dict[str, str], folder: Path, arguments: list[str], before: Callable[[int], None] | None
) -> None:
    """`moepress ARGUMENTS`; what it says goes to RANK.out and RANK.err in `folder`."""
    from moepress.cli import main

    torch.set_num_threads(1)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
    os.environ.update(group, RANK=str(rank), LOCAL_RANK=str(rank), HF_HUB_OFFLINE="1")
    sys.argv = ["moepress", *arguments]
    if before is not None:
        before(rank)
    main()


@dataclass(frozen=True)
class Dying:
    """One process is killed when it has finished so many layers."""

    victim: int
    layers: int

    def __call__(self, rank: int) -> None:
        from moepress.checkpoint.shared import SharedJob

        left = [self.layers]

        def counted(finish: Any) -> Any:
            def run(*args: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return finish(*args)

            return run

        if rank == self.victim:
            for name in ("finish", "finish_alone"):
                setattr(SharedJob, name, counted(getattr(SharedJob, name)))
