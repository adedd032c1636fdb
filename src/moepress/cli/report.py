from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moepress.cli.output import Json, print_json


def report(
    out: Annotated[Path, typer.Argument(help="An output of `moepress compress`, or its folder of records.")],
    every_layer: Annotated[
        bool, typer.Option(help="Draw the layers too that the page of a large model leaves out.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Draw the report of an output again. One page, its figures as SVG and PNG, their data as CSV."""
    from moepress.records import write_report

    page = write_report(out, every_layer)
    if as_json:
        print_json({"page": str(page), "figures": str(page.parent / "figures")})
    else:
        typer.echo(str(page))
