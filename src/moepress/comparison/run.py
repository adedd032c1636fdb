"""Compress one model in many ways on the same text and judge every result by the same held-out text."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from moepress.api import compress as compress_model
from moepress.api import open_source, prepare_recipe
from moepress.bench.results import continued, save, write
from moepress.bench.timing import machine, machine_words
from moepress.checkpoint.sizes import sizes_of
from moepress.comparison.page import write_page
from moepress.comparison.rounding import round_weights
from moepress.comparison.tables import tables_of
from moepress.data.batches import CalibrationData, calibration_batches
from moepress.errors import MoepressError
from moepress.evaluation import compare
from moepress.evaluation.continuation import common_start, continuations
from moepress.fit import average_experts, check_fit, skipped_layers
from moepress.memory import peak_memory
from moepress.models.find import find_layers
from moepress.progress import track
from moepress.recipe import Recipe

FILE = "compare"


@dataclass(frozen=True)
class Comparing:
    """What is compared, and how."""

    model: str
    methods: tuple[str, ...]
    """Names, names with a preset (`m-smoe:paper`), or recipe files."""
    calibration: str
    text: str
    """Held-out text, as for `moepress evaluate`."""
    keep: tuple[int | float, ...] = (0.75, 0.5)
    seeds: int = 1
    format: str | None = None
    """Of all; None: what each method does best."""
    samples: int | str = 256
    """Of calibration."""
    text_samples: int | str = "all"
    length: int = 512
    batch_size: int = 8
    bits: tuple[int, ...] = (8, 4)
    """Plain rounding of the original's weights, for comparison."""
    equal_bytes: bool = False
    """Also each method at the sizes that rounding gives, where experts alone can give them."""
    prompt: int = 64
    new: int = 32
    device: str | None = None

    def command(self) -> str:
        plain = Comparing(self.model, (), "", "")
        words = [f"moepress compare {self.model} --methods {','.join(self.methods)}"]
        words += [f"--calibration {self.calibration} --text {self.text}"]
        for name in ("keep", "bits"):
            if getattr(self, name) != getattr(plain, name):
                words.append(f"--{name} {','.join(map(str, getattr(self, name)))}")
        for name in ("seeds", "format", "samples", "text_samples", "length", "batch_size", "prompt", "new", "device"):
            if getattr(self, name) != getattr(plain, name):
                words.append(f"--{name.replace('_', '-')} {getattr(self, name)}")
        return " ".join([*words, *(["--equal-bytes"] if self.equal_bytes else [])])


@dataclass(frozen=True)
class Run:
    """One row: what is done to the model."""

    method: str
    size: str
    """`keep 0.5`, `8 bits` for rounding, `as 8 bits` for a method at the size that rounding gives."""
    seed: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    bits: int | None = None

    @property
    def name(self) -> str:
        return f"{self.method}, {self.size}, seed {self.seed}"


def compare_methods(asked: Comparing, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Write compare.json, .md and .html, and the figure as .svg, .png and .csv. Rows that an earlier, interrupted
    comparison of the same kind left there are not made again."""
    folder = Path(folder)
    recipes = {method: recipe_of(method, asked) for method in asked.methods}
    runs = [run for keep in asked.keep for run in runs_at(f"keep {keep}", {"keep": keep}, recipes, asked)]
    original, tokenizer, _ = open_source(asked.model, None, asked.device, False, None)
    layers = find_layers(original)
    for run in runs:
        recipe = made(run, asked)
        check_fit(recipe, layers)
        average_experts(recipe, original, layers, skipped_layers(recipe, original, layers))
    data = continued(
        folder,
        FILE,
        {"command": asked.command(), "settings": asdict(asked), "rows": {}, "out_of_reach": {}},
        may_grow=("methods", "keep", "seeds", "bits", "equal_bytes"),
    )
    text = held_out(asked, tokenizer, original)
    described = machine(next(original.parameters()).device)
    data["machine"] = described | {"words": machine_words(described)}
    same = compare(original, original, text, batch_size=asked.batch_size)
    written = continuations(original, text, prompt=asked.prompt, new=asked.new)
    data["original"] = {"bytes": sizes_of(original).bytes, **same.model.to_dict()} | {
        "domains": {name: score.model.to_dict() for name, score in same.domains.items()}
    }

    def carry_out(chosen: list[Run]) -> None:
        for run in track(chosen, "compare"):
            if run.name not in data["rows"]:
                data["rows"][run.name] = measure(run, asked, original, tokenizer, text, written)
                save(folder, FILE, data)

    rounding = [Run("rounding", f"{bits} bits", bits=bits) for bits in asked.bits]
    carry_out(rounding)
    if asked.equal_bytes:
        for run in rounding:
            size = data["rows"][run.name]["bytes"]
            for equal in runs_at(f"as {run.size}", {"target_size": str(size)}, recipes, asked):
                recipe = made(equal, asked)
                try:
                    average_experts(recipe, original, layers, skipped_layers(recipe, original, layers))
                except MoepressError as error:
                    data["out_of_reach"][equal.size] = str(error)
                else:
                    runs.append(equal)
    carry_out(runs)
    data["rows"] = {run.name: data["rows"][run.name] for run in [*rounding, *runs]}
    write(
        folder,
        FILE,
        data,
        f"Methods on {Path(asked.model).name}",
        tables_of(data),
        lambda _: write_page(data, folder, FILE),
    )
    return data


def runs_at(size: str, how: dict[str, Any], recipes: dict[str, dict[str, Any]], asked: Comparing) -> list[Run]:
    return [
        Run(method, size, seed, tuple({**given, **how, "seed": seed}.items()))
        for method, given in recipes.items()
        for seed in range(asked.seeds)
    ]


def recipe_of(method: str, asked: Comparing) -> dict[str, Any]:
    """The recipe entries that a method's name on the command line stands for."""
    if method.endswith((".yaml", ".yml")):
        from moepress.recipe import load_recipe

        given = load_recipe(method)
    else:
        name, _, preset = method.partition(":")
        given = {"method": name} | ({"preset": preset} if preset else {})
    return given | ({"format": asked.format} if asked.format else {})


def made(run: Run, asked: Comparing) -> Recipe:
    options = {
        "calibration.samples": asked.samples,
        "calibration.length": asked.length,
        "calibration.batch_size": asked.batch_size,
        **dict(run.options),
    }
    return prepare_recipe(None, asked.calibration, options)


def held_out(asked: Comparing, tokenizer: Any, model: PreTrainedModel) -> list[Any]:
    options = CalibrationData(
        source=asked.text,
        samples=asked.text_samples,  # type: ignore[arg-type]
        length=asked.length,
        batch_size=asked.batch_size,
    )
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    return calibration_batches(options, tokenizer, model.config, split="validation", shift=shift)


def measure(
    run: Run, asked: Comparing, original: PreTrainedModel, tokenizer: Any, text: list[Any], written: list[Any]
) -> dict[str, Any]:
    model = open_source(asked.model, tokenizer, asked.device, False, None)[0]
    start = time.perf_counter()
    with peak_memory(next(model.parameters()).device) as peak:
        if run.bits is not None:
            size = round_weights(model, run.bits)
        else:
            result = compress_model(model, tokenizer=tokenizer, recipe=made(run, asked))
            size = result.after.bytes
    seconds = time.perf_counter() - start
    score = compare(model, original, text, batch_size=asked.batch_size)
    row = {
        "method": run.method,
        "size": run.size,
        "seed": run.seed,
        "bytes": size,
        "seconds": seconds,
        "peak_memory": peak.bytes,
        "continuation": common_start(continuations(model, text, prompt=asked.prompt, new=asked.new), written),
        **score.to_dict(),
    }
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row
