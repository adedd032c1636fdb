from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moepress.cli.output import Json, print_json


def verify(
    folder: Annotated[Path, typer.Argument(help="An output of `moepress compress`.")],
    as_json: Json = False,
) -> None:
    """Check every file of an output against its checksums. They were taken when it was written."""
    import moepress
    from moepress.checkpoint.sizes import human_size

    found = moepress.verify(folder)
    if as_json:
        print_json(asdict(found) | {"whole": found.whole})
    else:
        for name, reason in found.wrong.items():
            typer.echo(f"{name} {reason}")
        for name in found.extra:
            typer.echo(f"{name} is not in the manifest")
        if found.whole:
            typer.echo(f"{folder} is whole: {found.files} files, {human_size(found.bytes)}")
    if not found.whole:
        raise typer.Exit(1)
