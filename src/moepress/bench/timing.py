"""How benchmarks measure: the versions take turns within one run, so that a machine that changes its speed meanwhile
changes it for all of them; medians with their spread; the machine in words."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

R = TypeVar("R")


@dataclass(frozen=True)
class Clock:
    """Seconds on a device: wall time, or the time that processors gave to this process. On a machine that is shared,
    only the latter says what a computation costs; with several threads it adds them up."""

    device: torch.device
    cpu_time: bool

    @classmethod
    def on(cls, device: torch.device) -> Clock:
        return cls(device, cpu_time=device.type == "cpu" and torch.get_num_threads() == 1)

    @property
    def words(self) -> str:
        return "CPU seconds of one thread" if self.cpu_time else "wall seconds"

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.process_time() if self.cpu_time else time.perf_counter()

    def time(self, work: Callable[[], R]) -> tuple[float, R]:
        start = self.now()
        result = work()
        return self.now() - start, result


@dataclass
class Timing:
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def per(self, items: int) -> Timing:
        return Timing([seconds / items for seconds in self.seconds])

    def words(self) -> str:
        """Median, and from the fastest to the slowest."""
        if len(self.seconds) == 1:
            return human_seconds(self.median)
        return f"{human_seconds(self.median)} ({human_seconds(min(self.seconds))} – {human_seconds(max(self.seconds))})"

    def to_dict(self) -> dict[str, Any]:
        return {"median": self.median, "low": min(self.seconds), "high": max(self.seconds), "seconds": self.seconds}


def take_turns(
    clock: Clock, work: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1
) -> dict[str, Timing]:
    """Time each piece of work `repeats` times, one after the other in each round."""
    timings = {name: Timing() for name in work}
    for round_ in range(-warmup, repeats):
        for name, run in work.items():
            seconds, _ = clock.time(run)
            if round_ >= 0:
                timings[name].seconds.append(seconds)
    return timings


def human_seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * scale:  # 999.6 µs are 1 ms
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def machine(device: torch.device) -> dict[str, Any]:
    """What the measurements ran on, without saying whose machine it is."""
    described: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        described["gpu"] = torch.cuda.get_device_name(device)
    for package in ("torch", "numpy", "scipy", "numba", "triton", "transformers"):
        try:
            described[package] = version(package)
        except PackageNotFoundError:
            continue
    return described


def machine_words(described: Mapping[str, Any]) -> str:
    gpu = f"{described['gpu']}; " if "gpu" in described else ""
    packages = ", ".join(
        f"{name} {described[name]}" for name in ("python", "torch", "scipy", "numba", "triton") if name in described
    )
    return f"{gpu}{described['processor']}, {described['threads']} of {described['cores']} cores; {packages}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return ", ".join(sorted(names)) or platform.machine()
