"""`moepress bench model`: one forward pass of a whole Switch Transformer in transformers' versions and in ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moepress.bench.results import Table, write
from moepress.bench.side_by_side import bars, device_of, dtype_of, known, on_inputs, record
from moepress.bench.timing import Clock, Timing, take_turns
from moepress.bench.versions import SAME, VERSIONS, Squeeze, on_device, relative, shared_copy
from moepress.errors import MoepressError
from moepress.progress import track


@dataclass(frozen=True)
class Settings:
    """switch-base-32 and the token counts of the paper's latencies, but for the batch."""

    width: int = 768
    hidden: int = 3072
    heads: int = 12
    layers: int = 12
    """Of the encoder, and as many of the decoder; every second one is sparse."""
    vocabulary: int = 32128
    experts: int = 32
    keep: int = 8
    rank: int = 32
    ratio: float = 0.1
    skipped: int = 1
    """Sparse layers at the front that stay whole, as in the paper."""
    batches: tuple[int, ...] = (1,)
    source: int = 329
    target: int = 13
    dtypes: tuple[str, ...] = ("bfloat16",)
    only: tuple[str, ...] = ()
    repeats: int = 5
    device: str = "cpu"
    seed: int = 0

    @property
    def squeeze(self) -> Squeeze:
        return Squeeze(self.keep, self.rank, self.ratio)

    def names(self) -> list[str]:
        layers = [name for name in VERSIONS if name != "dense-quick"]  # there is no such model
        return [name for name in layers if not self.only or name in self.only or name in ("dense", "native")]


def run(settings: Settings, folder: Path) -> tuple[dict[str, Any], list[Table]]:
    """Measure, and write model.json, model.md and model.png."""
    lists = {"batches": "--batch", "dtypes": "--dtype", "only": "--only"}
    data = record("model", settings, folder, lists, device_of(settings.device), rows=measure(settings))
    tables = tables_of(data)
    write(folder, "model", data, "A whole Switch Transformer, random weights", tables, drawing(data))
    return data, tables


@torch.no_grad()
def measure(settings: Settings) -> list[dict[str, Any]]:
    """One record for each version, batch and dtype: the seconds of a forward pass with given target tokens."""
    known(settings.only, Settings().names(), "version")
    settings.squeeze.check(settings.experts)
    if settings.layers < 2 or settings.width % settings.heads:
        raise MoepressError("a model has at least 2 layers, and heads that divide its width")
    device, records = device_of(settings.device), []
    for dtype in settings.dtypes:
        models = build(settings, dtype_of(dtype), device)
        for batch in track(settings.batches, f"model, {dtype}"):
            records += _measure(settings, models, batch, dtype)
        del models
    return records


def build(settings: Settings, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """All versions, with shared parameters but for the dense model."""
    from transformers import (
        SwitchTransformersConfig,
        SwitchTransformersForConditionalGeneration,
        T5Config,
        T5ForConditionalGeneration,
    )

    common: dict[str, Any] = dict(
        d_model=settings.width, d_ff=settings.hidden, d_kv=settings.width // settings.heads, dropout_rate=0.0,
        num_heads=settings.heads, num_layers=settings.layers, num_decoder_layers=settings.layers,
        vocab_size=settings.vocabulary, decoder_start_token_id=0,
    )  # fmt: skip
    sparse = settings.layers // 2
    config = SwitchTransformersConfig(
        num_experts=settings.experts, num_sparse_encoder_layers=sparse, num_sparse_decoder_layers=sparse,
        expert_capacity=1 << 20, **common,
    )  # fmt: skip
    native = on_device(lambda: SwitchTransformersForConditionalGeneration(config), dtype, device, settings.seed)
    models = {}
    for name in settings.names():
        if name == "dense":
            plain = T5Config(feed_forward_proj="relu", **common)
            models[name] = on_device(lambda: T5ForConditionalGeneration(plain), dtype, device, settings.seed)  # noqa: B023
        else:
            models[name] = native if name == "native" else replaced(native, name, settings)
    return models


def replaced(native: Any, name: str, settings: Settings) -> Any:
    """The model with another version of its sparse layers, but for the first ones where it keeps fewer experts."""
    other = shared_copy(native)
    blocks = [path for path, module in other.named_modules() if type(module).__name__ == "SwitchTransformersSparseMLP"]
    whole = {"grouped-merged": "grouped", "m-smoe": "full", "m-smoe-few-rows": "full", "mc-smoe": "full"}
    for i, path in enumerate(blocks):
        version = name if i >= settings.skipped else whole.get(name, name if name in whole.values() else "native")
        parent, _, leaf = path.rpartition(".")
        made = VERSIONS[version].make(native.get_submodule(path), settings.squeeze)
        setattr(other.get_submodule(parent), leaf, made.eval())
    return other


def _measure(settings: Settings, models: dict[str, nn.Module], batch: int, dtype: str) -> list[dict[str, Any]]:
    device = torch.device(settings.device)
    draw = torch.Generator(device).manual_seed(settings.seed + batch)

    def ids(length: int) -> torch.Tensor:
        return torch.randint(2, settings.vocabulary, (batch, length), generator=draw, device=device)

    inputs = [
        {"input_ids": ids(settings.source), "decoder_input_ids": ids(settings.target)}
        for _ in range(settings.repeats + 1)
    ]

    def forward(model: Any) -> Callable[[Any], Any]:
        return lambda given: model(**given, use_cache=False).logits

    logits = {name: forward(model)(inputs[0]).float() for name, model in models.items()}
    apart = {b: relative(logits[a], logits[b]) for a, b in SAME if a in logits and b in logits}
    work = {name: on_inputs(forward(model), inputs) for name, model in models.items()}
    timings = take_turns(Clock.on(device), work, settings.repeats)
    tokens = batch * (settings.source + settings.target)
    return [
        {
            "version": name,
            "words": VERSIONS[name].words if name != "dense" else "dense T5 of the same width",
            "batch": batch,
            "dtype": dtype,
            "parameters": sum(p.numel() for p in models[name].parameters()),
            "seconds": timing.to_dict(),
            "tokens_per_second": tokens / timing.median,
            "to_dense": timing.median / timings["dense"].median,
            "to_native": timing.median / timings["native"].median,
        }
        | ({"apart": apart[name]} if name in apart else {})
        for name, timing in timings.items()
    ]


def tables_of(data: dict[str, Any]) -> list[Table]:
    settings = data["settings"]
    note = (
        f"One forward pass of {settings['source']} source and {settings['target']} target tokens a sample. Median of "
        f"{settings['repeats']} rounds in which the versions take turns (fastest – slowest), {data['clock']}."
    )
    tables = []
    for dtype in settings["dtypes"]:
        for batch in settings["batches"]:
            cells = [
                [
                    row["words"],
                    f"{row['parameters'] / 1e6:.1f} M",
                    Timing(row["seconds"]["seconds"]).words(),
                    f"{row['tokens_per_second']:.0f}",
                    f"{row['to_native']:.2f}",
                    f"{row['to_dense']:.2f}",
                    f"{row['apart']:.0e}" if "apart" in row else "–",
                ]
                for row in data["rows"]
                if (row["dtype"], row["batch"]) == (dtype, batch)
            ]
            columns = "version|parameters|time|tokens a second|to all experts in transformers|to dense|apart"
            tables.append(Table(f"batch {batch}, {dtype}", columns.split("|"), cells, note))
    return tables


def drawing(data: dict[str, Any]) -> Callable[[Path], None]:
    cases = [(dtype, batch) for dtype in data["settings"]["dtypes"] for batch in data["settings"]["batches"]]
    groups = [
        {r["words"]: r["seconds"]["median"] for r in data["rows"] if (r["dtype"], r["batch"]) == case} for case in cases
    ]
    return bars([f"batch {batch}, {dtype}" for dtype, batch in cases], groups, data["clock"])
