"""What benchmarks of versions have in common: their command lines, devices, CUDA graphs and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from moepress.bench.timing import Clock, human_seconds, machine, machine_words
from moepress.errors import MoepressError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def command(name: str, settings: Any, folder: Path, lists: dict[str, str]) -> str:
    """The command line that a settings object stands for. `lists`: the option of each entry that can be repeated."""
    plain = type(settings)()
    words = []
    for key, value in asdict(settings).items():
        if value == getattr(plain, key):
            continue
        if key in lists:
            words += [f"{lists[key]} {each}" for each in value]
        else:
            words.append(f"--{key.replace('_', '-')} {value}")
    threads = f"OMP_NUM_THREADS={torch.get_num_threads()} " if settings.device == "cpu" else ""
    out = [] if folder.is_absolute() else [f"-o {folder}"]
    return " ".join([f"{threads}moepress bench {name}", *words, *out])


def record(
    name: str, settings: Any, folder: Path, lists: dict[str, str], device: torch.device, **found: Any
) -> dict[str, Any]:
    """What a benchmark writes down: how it is made again, where it ran, what it found."""
    described = machine(device)
    return {
        "benchmark": name,
        "command": command(name, settings, folder, lists),
        "machine": described | {"words": machine_words(described)},
        "clock": Clock.on(device).words,
        "settings": asdict(settings),
    } | found


def device_of(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise MoepressError(f"device {name!r} is none that torch knows: use cpu or cuda, or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MoepressError("there is no CUDA device here: use --device cpu")
    return device


def dtype_of(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise MoepressError(f"there is no dtype {name!r} here: {', '.join(DTYPES)}")
    return DTYPES[name]


def known(names: Iterable[str], all_of_them: Iterable[str], what: str) -> None:
    listed = list(all_of_them)
    for name in names:
        if name not in listed:
            raise MoepressError(f"there is no {what} {name!r}: known are {', '.join(listed)}")


def on_inputs(run: Callable[[Any], object], inputs: list[Any]) -> Callable[[], object]:
    """One call on the next input, so that no version profits from having seen it."""
    turn = cycle(inputs)
    return lambda: run(next(turn))


def as_graph(run: Callable[[Any], object], inputs: list[Any]) -> Callable[[Any], object]:
    """The same as a CUDA graph that is replayed on other inputs of this shape."""
    held = inputs[0].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(held)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(held)

    def replay(x: Any) -> None:
        held.copy_(x)
        graph.replay()

    return replay


def bars(titles: list[str], groups: list[dict[str, float]], label: str) -> Callable[[Path], None]:
    """One panel for each title, one bar for each version, with its seconds."""

    def draw(file: Path) -> None:
        from matplotlib.figure import Figure

        names = list(groups[0])
        figure = Figure(figsize=(9, 0.8 + 0.32 * len(names) * len(groups) + 0.5 * len(groups)), layout="constrained")
        panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
        for axes, title, group in zip(panels, titles, groups, strict=True):
            colours = ["#1f6f8b" if name.startswith("moepress") else "#9aa5b1" for name in group]
            axes.barh(list(group), list(group.values()), color=colours)
            for place, seconds in enumerate(group.values()):
                axes.text(seconds, place, f" {human_seconds(seconds)}", va="center", fontsize=8)
            axes.invert_yaxis()
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_xlim(right=max(group.values()) * 1.15)
            axes.spines[["top", "right"]].set_visible(False)
        panels[-1].set_xlabel(label)
        figure.savefig(file, dpi=130)

    return draw
