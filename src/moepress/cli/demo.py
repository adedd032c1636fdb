from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moepress.cli.output import Json, print_json, print_table, quiet_if


def demo(
    out: Annotated[Path, typer.Option("-o", "--out", help="Where the results go.")] = Path("moepress-demo"),
    overwrite: Annotated[bool, typer.Option(help="Replace results that exist.")] = True,
    as_json: Json = False,
) -> None:
    """Halve the experts of the small model that comes along. Takes under a minute, no downloads."""
    from moepress.demo import run_demo

    with quiet_if(as_json):
        shown = run_demo(out, overwrite=overwrite)
    if as_json:
        print_json(shown)
        return
    columns = ["weights", "experts in all", "perplexity", "KL to the original"]
    rows = [
        [row["name"], row["size"], str(row["experts"]), f"{row['perplexity']:.1f}", f"{row['kl']:.3f}"]
        for row in shown["rows"]
    ]
    print_table("demo: half of the experts of a 4.4 M parameter model", ["", *columns], rows)
    typer.echo(f"Models, plan and figure: {shown['folder']}", file=sys.stdout)
