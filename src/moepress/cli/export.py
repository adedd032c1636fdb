from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moepress.cli.output import Json, print_json, quiet_if


def export(
    model: Annotated[Path, typer.Argument(help="A compact checkpoint.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where the vanilla checkpoint goes.")],
    duplicate: Annotated[
        bool, typer.Option(help="Write merged experts once for each original expert: exact, and no smaller.")
    ] = False,
    multiple_of: Annotated[int, typer.Option(help="Require a multiple of this many experts per layer.")] = 1,
    overwrite: Annotated[bool, typer.Option(help="Replace an output folder that exists.")] = False,
    max_shard_size: Annotated[str, typer.Option(help="Of the output's files.")] = "5GB",
    as_json: Json = False,
) -> None:
    """Write a compact checkpoint as one that loads without moepress."""
    from moepress import api
    from moepress.inspection import inspect_model

    with quiet_if(as_json):
        before = inspect_model(model)
        sizes = api.export(
            model,
            out,
            duplicate=duplicate,
            multiple_of=multiple_of,
            overwrite=overwrite,
            max_shard_size=max_shard_size,
        )
    if as_json:
        print_json({"folder": str(out)} | sizes.to_dict())
    else:
        typer.echo(f"{out}: {sizes.parameters:,} parameters, {sizes.human()}")
        if any(layer.rank for layer in before.layers):
            typer.echo(f"its decomposed matrices were multiplied out: the compact checkpoint is {before.sizes.human()}")
