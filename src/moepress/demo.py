"""The demonstration: a small real model at half of its experts, before and after, in numbers and a figure."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from moepress import api
from moepress.checkpoint.load import load_model
from moepress.checkpoint.sizes import sizes_of
from moepress.data.batches import CalibrationData, calibration_batches
from moepress.evaluation import compare
from moepress.models.find import find_layers
from moepress.progress import track

WAYS = {"m-smoe": "compact", "auto": "vanilla"}
"""The paper's merging and the default method, each in one of the two formats."""


def run_demo(out: Path, overwrite: bool = True) -> dict[str, Any]:
    with as_file(files("moepress") / "assets") as assets:
        source = assets / "demo-moe"
        original = load_model(source)
        tokenizer = api.load_tokenizer(source)
        held_out = CalibrationData(source=str(assets / "demo-eval.jsonl"), samples="all", length=256)
        text = calibration_batches(held_out, tokenizer, original.config, split="validation")
        same = compare(original, original, text)
        rows = [_row("original", original, same.model.perplexity, same.kl)]
        results = {}
        for method, form in track(list(WAYS.items()), "compress"):
            results[method] = api.compress(
                source,
                out / method,
                method=method,
                format=form,
                calibration=str(assets / "demo-text.jsonl"),
                keep=0.5,
                overwrite=overwrite,
                recipe={"calibration": {"length": 256, "samples": 128}},
            )
            reloaded = load_model(out / method)
            score = compare(reloaded, original, text)
            rows.append(_row(f"{method}, {form}", reloaded, score.model.perplexity, score.kl))
    draw(results["m-smoe"], out / "demo.png")
    return {"folder": str(out), "rows": rows, "figure": str(out / "demo.png")}


def _row(name: str, model: Any, perplexity: float, kl: float) -> dict[str, Any]:
    sizes = sizes_of(model)
    experts = sum(layer.bank.num_experts for layer in find_layers(model))
    return {
        "name": name,
        "size": sizes.human(),
        "bytes": sizes.bytes,
        "experts": experts,
        "perplexity": perplexity,
        "kl": kl,
    }


def draw(result: api.Compressed, path: Path) -> None:
    """How often each expert is used, and which lead a group: the paper's heat map, for this model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    outcome = result.outcome
    layers = outcome.plan.layers
    counts = [outcome.statistics.of(layer.name, "usage")["count"] for layer in layers]
    share = [(count / count.sum()).tolist() for count in counts]
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.5 * len(layers)), layout="constrained")
    image = axes.imshow(share, cmap="Blues", aspect="auto")
    for y, layer in enumerate(layers):
        for group in layer.groups:
            axes.text(group.leader, y, "●", ha="center", va="center", color="darkorange", fontsize=8)
    axes.set(xlabel="expert", ylabel="MoE layer", yticks=range(len(layers)))
    axes.set_title("Share of routing decisions per expert; ● stays and leads a group", fontsize=10)
    figure.colorbar(image, ax=axes, label="share")
    figure.savefig(path, dpi=150)
    plt.close(figure)
