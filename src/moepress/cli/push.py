from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moepress.cli.output import Json, print_json, quiet_if


def push(
    folder: Annotated[Path, typer.Argument(help="An output of moepress.")],
    repo: Annotated[str, typer.Argument(help="Where it goes on the Hub: USER/MODEL.")],
    private: Annotated[bool, typer.Option("--private", help="For you alone, if it is made now.")] = False,
    revision: Annotated[str | None, typer.Option(help="A branch, made if it is not there.")] = None,
    as_json: Json = False,
) -> None:
    """Upload an output to the Hugging Face Hub, if it is whole."""
    import moepress

    with quiet_if(as_json):
        address = moepress.push(folder, repo, private=private, revision=revision)
    if as_json:
        print_json({"folder": str(folder), "address": address})
    else:
        typer.echo(address)
