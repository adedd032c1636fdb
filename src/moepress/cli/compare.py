from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moepress.cli.compress import parse_int, parse_keep
from moepress.cli.output import Json, print_results, quiet_if
from moepress.errors import MoepressError


def compare(
    model: Annotated[str, typer.Argument(help="A folder or a Hub name.")],
    methods: Annotated[
        str, typer.Option(help="Names with commas between them; NAME:PRESET and recipe files (.yaml) as well.")
    ],
    calibration: Annotated[str, typer.Option(help="As for compress.")],
    text: Annotated[str, typer.Option(help="Held-out text to judge by, as for --calibration.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for compare.json, .md, .html and the figure.")],
    keep: Annotated[str, typer.Option(help="Experts per layer, with commas: counts or fractions.")] = "0.75,0.5",
    seeds: Annotated[int, typer.Option(min=1, help="Compressions of each kind, on other samples of the text.")] = 1,
    format: Annotated[str | None, typer.Option(help="compact or vanilla. [default: what the method does best]")] = None,
    samples: Annotated[str, typer.Option(help="Calibration samples, or `all`.")] = "256",
    text_samples: Annotated[str, typer.Option(help="Samples of held-out text, or `all`.")] = "all",
    length: Annotated[int, typer.Option(help="Tokens of a sample.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a forward pass.")] = 8,
    bits: Annotated[str, typer.Option(help="Plain rounding of the weights to compare with, or `none`.")] = "8,4",
    equal_bytes: Annotated[bool, typer.Option(help="Also each method at the sizes that rounding gives.")] = False,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens that are continued.")] = 64,
    new: Annotated[int, typer.Option(min=1, help="Tokens that are written.")] = 32,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …")] = None,
    as_json: Json = False,
) -> None:
    """Methods side by side: quality, size, time and memory. Conditions are equal. What an interrupted comparison has
    measured is used when it is started again."""
    from moepress.comparison import Comparing, compare_methods
    from moepress.comparison.tables import tables_of

    asked = Comparing(
        model=model,
        methods=tuple(filter(None, (name.strip() for name in methods.split(",")))),
        calibration=calibration,
        text=text,
        keep=tuple(value for part in keep.split(",") if (value := parse_keep(part)) is not None),
        seeds=seeds,
        format=format,
        samples=samples if samples == "all" else parse_int("--samples", samples),
        text_samples=text_samples if text_samples == "all" else parse_int("--text-samples", text_samples),
        length=length,
        batch_size=batch_size,
        bits=() if bits == "none" else tuple(parse_bits(part) for part in bits.split(",")),
        equal_bytes=equal_bytes,
        prompt=prompt,
        new=new,
        device=device,
    )
    with quiet_if(as_json):
        data = compare_methods(asked, out)
    print_results(data, tables_of(data), f"Page: {out / 'compare.html'}", as_json)


def parse_bits(text: str) -> int:
    bits = parse_int("--bits", text)
    if not 2 <= bits <= 8:
        raise MoepressError(f"--bits takes 2 to 8, not {bits}")
    return bits
