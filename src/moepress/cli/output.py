"""What every command prints with: JSON for programs, tables for people, progress only for the latter."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from moepress.progress import show_progress
from moepress.watch import leads

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]


@contextmanager
def quiet_if(as_json: bool) -> Iterator[None]:
    """Progress bars for people on a terminal; silence for programs."""
    with show_progress(not as_json and leads() and Console(stderr=True).is_terminal):
        yield


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))


def print_table(title: str, columns: list[str], rows: list[list[str]], note: str = "") -> None:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if note:  # not as the table's caption, which would be broken to the table's width
        typer.echo(note)


def print_results(data: Any, tables: Iterable[Any], written: str, as_json: bool) -> None:
    """What was measured, as data or as tables, and then a line that says where it lies."""
    if as_json:
        print_json(data)
        return
    for table in tables:
        print_table(table.title, table.columns, table.rows, table.note)
    typer.echo(written)
