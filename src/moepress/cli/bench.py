"""Measurements that everyone can repeat; each writes its results into a folder."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from moepress.cli.output import Json, print_results, quiet_if

Out = Annotated[Path, typer.Option("-o", "--out", help="Folder for the results: NAME.json, NAME.md and NAME.png.")]
Width = Annotated[int, typer.Option(min=1, help="Input width of an expert.")]
Hidden = Annotated[int, typer.Option(min=1, help="Hidden units of an expert.")]
Experts = Annotated[int, typer.Option(min=1, help="Experts of a layer.")]
Keep = Annotated[int, typer.Option(min=1, help="Experts that are left when it is merged.")]
Rank = Annotated[int, typer.Option(min=1, help="Of decomposed experts.")]
Ratio = Annotated[float, typer.Option(min=0, max=1, help="Share of the columns that decomposed experts keep.")]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help="float32, bfloat16, float16. Repeat for several.")]
Only = Annotated[
    list[str] | None, typer.Option(help="Only these versions, beside dense and native. Repeat for several.")
]
Repeats = Annotated[int, typer.Option(min=1, help="Rounds.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, …")]
Seed = Annotated[int, typer.Option(help="Of weights and inputs.")]
FOLDER = Path("out/bench")

app = typer.Typer(no_args_is_help=True, help="Measure moepress against what it replaces.", rich_markup_mode=None)


LISTS = {
    "batch": "batches",
    "budget": "budgets",
    "dtype": "dtypes",
    "family": "families",
    "method": "methods",
    "only": "only",
    "shape": "shapes",
    "tokens": "tokens",
}
"""Options that may be repeated, and what the settings call them."""


def run(benchmark: str, given: dict[str, Any]) -> None:
    """Run one with the options that its command was given, and print what it found."""
    module = import_module(f"moepress.bench.{benchmark}")
    out, as_json = given.pop("out"), given.pop("as_json")
    lists = {name: LISTS[name] for name in given if name in LISTS}
    chosen = {name: value for name, value in given.items() if name not in lists}
    chosen |= {entry: tuple(given[name]) for name, entry in lists.items() if given[name]}
    if chosen.get("folder") is not None:
        chosen["folder"] = str(chosen["folder"])
    with quiet_if(as_json):
        data, tables = module.run(module.Settings(**chosen), out)
    print_results(data, tables, f"Written to {out}", as_json)


@app.callback()
def options() -> None:
    pass


@app.command()
def align(
    out: Out = FOLDER,
    hidden: Hidden = 3072,
    width: Width = 768,
    count: Annotated[int, typer.Option(min=1, help="Experts of a layer that are aligned to another one.")] = 24,
    reference: Annotated[int, typer.Option(min=1, help="How many of them SciPy solves in a round.")] = 8,
    repeats: Repeats = 3,
    family: Annotated[
        list[str] | None, typer.Option(help="Only these experts: iid, lognormal, upcycled-1, upcycled-3.")
    ] = None,
    solver: Annotated[str, typer.Option(help="Ours: auto, auction, scipy.")] = "auto",
    model_problems: Annotated[
        int, typer.Option(min=0, help="Also this many problems as one model (264: switch-base-32).")
    ] = 0,
    device: Device = "cpu",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Align the experts of a layer. With SciPy as in the paper's code, and with ours."""
    run("align", locals())


@app.command()
def memory(
    out: Out = FOLDER,
    shape: Annotated[list[str] | None, typer.Option(help="switch (switch-base-32 at 4 GB), qwen3-moe.")] = None,
    size: Annotated[str, typer.Option(help="Of the random checkpoint, about.")] = "4GB",
    method: Annotated[list[str] | None, typer.Option(help="See `moepress methods`. [default: auto]")] = None,
    budget: Annotated[
        list[str] | None, typer.Option("--memory", help="What it may take, one run each. [default: what it takes]")
    ] = None,
    keep: Annotated[float, typer.Option(help="Share of the experts that stay.")] = 0.5,
    samples: Annotated[int, typer.Option(min=1, help="Calibration samples.")] = 32,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sample.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a forward pass.")] = 8,
    floor: Annotated[bool, typer.Option(help="Also time reading and calibration alone.")] = True,
    folder: Annotated[Path | None, typer.Option(help="Where the checkpoint is written and removed again.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights and text.")] = 0,
    as_json: Json = False,
) -> None:
    """Peak memory and time of compressing a random checkpoint. Of any size."""
    run("memory", locals())


@app.command()
def layer(
    out: Out = FOLDER,
    width: Width = 768,
    hidden: Hidden = 3072,
    experts: Experts = 32,
    keep: Keep = 8,
    rank: Rank = 32,
    ratio: Ratio = 0.1,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="In one call. Repeat for several.")] = None,
    dtype: Dtypes = None,
    only: Only = None,
    repeats: Repeats = 9,
    calls: Annotated[int, typer.Option(min=1, help="Of each version in a round.")] = 1,
    device: Device = "cpu",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """One Switch layer. In transformers' versions and in moepress', beside a dense layer."""
    run("layer", locals())


@app.command()
def model(
    out: Out = FOLDER,
    width: Width = 768,
    hidden: Hidden = 3072,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 12,
    layers: Annotated[int, typer.Option(min=2, help="Of the encoder, and of the decoder.")] = 12,
    vocabulary: Annotated[int, typer.Option(min=8, help="Tokens that there are.")] = 32128,
    experts: Experts = 32,
    keep: Keep = 8,
    rank: Rank = 32,
    ratio: Ratio = 0.1,
    skipped: Annotated[int, typer.Option(min=0, help="Sparse layers at the front that stay whole.")] = 1,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Samples of one pass. Repeat for several.")] = None,
    source: Annotated[int, typer.Option(min=1, help="Tokens of a sample for the encoder.")] = 329,
    target: Annotated[int, typer.Option(min=1, help="Tokens of a sample for the decoder.")] = 13,
    dtype: Dtypes = None,
    only: Only = None,
    repeats: Repeats = 5,
    device: Device = "cpu",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """A whole Switch Transformer with random weights. In transformers' versions and in moepress', beside a dense T5."""
    run("model", locals())


@app.command()
def merge(
    out: Out = FOLDER,
    width: Width = 768,
    hidden: Hidden = 3072,
    experts: Experts = 32,
    keep: Keep = 8,
    dtype: Dtypes = None,
    repeats: Repeats = 9,
    folder: Annotated[Path | None, typer.Option(help="Where the layer is written and removed again.")] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Merge the experts of one layer. Beside reading their bytes from the page cache."""
    run("merge", locals())
