"""Put the commands together; say errors in one sentence with exit code 2."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Annotated

import typer

from moepress import __version__
from moepress.cli import (
    bench,
    compare,
    compress,
    demo,
    evaluate,
    export,
    finetune,
    inspect,
    methods,
    paper,
    push,
    recover,
    report,
    verify,
)
from moepress.errors import MoepressError
from moepress.watch import leads

# Before torch is imported: threads that wait give their core away. On a busy machine that is three times faster.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Large tensors in large pages: with small ones, Linux takes longer to hand out the memory of merged experts than they
# take to be computed.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

INTERRUPTED = 130

app = typer.Typer(
    name="moepress",
    help="Make Mixture-of-Experts models smaller: merge their experts and write checkpoints that really load.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (compress, recover, finetune, compare, inspect, evaluate, export, push, report, verify, methods, demo):
    name = command.__name__.rpartition(".")[2]
    app.command(name)(getattr(command, name))
app.add_typer(bench.app, name="bench")
app.add_typer(paper.app, name="paper")


def _show_version(wanted: bool) -> None:
    if wanted:
        import platform
        from importlib.metadata import version

        versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "safetensors"))
        typer.echo(f"moepress {__version__} ({versions}, Python {platform.python_version()}, {platform.platform()})")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    pass


def _how_on(command: list[str]) -> str:
    resumable = command and command[0] in ("compress", "recover", "finetune")
    return "; if some of the work was finished, the same command with --resume goes on" if resumable else ""


def main() -> None:
    silent = sys.argv[1:2] == ["compress"] and not leads()  # the first of several processes speaks for all
    if silent:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
    try:
        app()
    except MoepressError as error:
        if not silent:
            print(f"moepress: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # typer turns Ctrl-C into this and says nothing
            print(f"moepress: interrupted; no output was written{_how_on(sys.argv[1:2])}", file=sys.stderr)
        raise
