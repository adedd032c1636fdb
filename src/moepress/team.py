"""The processes that work on one compression together, as torchrun starts them.

Each runs its share of the calibration batches; what they find is put together in the order of the batches, so that all
of them know the same and decide the same. A process that works alone is a team of one, for which nothing here costs
anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from moepress.errors import MoepressError
from moepress.watch import Watch

T = TypeVar("T")
P = ParamSpec("P")
FOREVER = timedelta(days=30)
"""How long one process waits for the others: writing a large model takes hours, and `Watch` knows who has died."""
PATIENCE = 30.0
"""Seconds that `Watch` gets to say who it was when a connection breaks."""


class Team:
    """Of one process."""

    rank = 0
    size = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes the output and speaks."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Which of so many batches this process runs: neighbours. The first batch is the first process's."""
        return range(-(-self.rank * count // self.size), -(-(self.rank + 1) * count // self.size))

    def own(self, items: list[T]) -> list[T]:
        """This process's share; one that has none runs the first, which another one has, to go where the others go."""
        return [items[i] for i in self.share(len(items)) or range(1)]

    def turns(self, items: list[T]) -> list[T]:
        """Which of some things that are independent of each other this process does."""
        return items[self.rank :: self.size]

    def gather(self, value: T) -> list[T]:
        """What every process says, in the order of their ranks."""
        return [value]

    def first(self, value: T) -> T:
        """What the first process says."""
        return value

    def add_up(self, *totals: Tensor) -> None:
        """Add those of all processes, in place. The order is not defined: they must be such that it does not matter
        (see `exact.py`)."""

    def check_same(self, known: dict[str, Any]) -> None:
        """Refuse to go on where processes have been started in different ways."""

    def device(self, asked: str | None) -> str | None:
        """The device that this process should use where `cuda` is asked for."""
        return asked


ALONE = Team()
_current: ContextVar[Team] = ContextVar("moepress_team", default=ALONE)


class Processes(Team):
    """Of several, connected by `torch.distributed`."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.watch = Watch(self.rank, self.size)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        self._own = not dist.is_initialized()
        with self._connected():
            if self._own:
                dist.init_process_group(backend)
            self._dist, self._group = dist, dist.new_group(backend=backend, timeout=FOREVER)
        self.watch.begin(self.first)

    def gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        with self._connected():
            self._dist.all_gather_object(found, value, group=self._group)
        return found

    def first(self, value: T) -> T:
        said: list[Any] = [value]
        with self._connected():
            self._dist.broadcast_object_list(said, src=0, group=self._group)
        return said[0]

    def add_up(self, *totals: Tensor) -> None:
        with self._connected():
            for total in totals:
                self._dist.all_reduce(total, group=self._group)

    def check_same(self, known: dict[str, Any]) -> None:
        first, *others = self.gather(known)
        for rank, other in enumerate(others, 1):
            if changed := [name for name in first if other[name] != first[name]]:
                raise MoepressError(
                    f"rank {rank} of {self.size} has another {changed[0].replace('_', ' ')} than rank 0: start all "
                    "with the same command, on machines that are alike"
                )

    def device(self, asked: str | None) -> str | None:
        return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if asked == "cuda" else asked

    def leave(self, error: BaseException | None) -> None:
        """Alone again. Without an error all leave together."""
        if error is None:
            self.gather(None)
        self.watch.end(error)
        if self._own and error is None:
            self._dist.destroy_process_group()

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            time.sleep(PATIENCE)  # the watch says who has died and ends this process
            reason = str(error).strip().partition("\n")[0]
            raise MoepressError(f"the connection to the other processes is lost: {reason}") from error


def current() -> Team:
    """The processes among which this one works."""
    return _current.get()


def in_processes(function: Callable[P, T]) -> Callable[P, T]:
    """Where torchrun (or another launcher that sets RANK and WORLD_SIZE) has started several processes, they are
    connected while the function runs; an error in one ends all."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if int(os.environ.get("WORLD_SIZE", "1")) <= 1 or "RANK" not in os.environ or current() is not ALONE:
            return function(*args, **kwargs)
        team = Processes()
        token = _current.set(team)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            team.leave(error)
            raise
        finally:
            _current.reset(token)
        team.leave(None)
        return result

    return run


def machine() -> dict[str, Any]:
    """What has to be alike where the same numbers are to come out."""
    return {
        "number of threads": torch.get_num_threads(),
        "kind of processor": torch.backends.cpu.get_cpu_capability(),
        "kind of GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
