"""The paper's tables, made again."""

from __future__ import annotations

from typing import Annotated

import typer

from moepress.cli.output import Json, print_json, print_table

app = typer.Typer(no_args_is_help=True, help="The paper's figures, and ours beside them.", rich_markup_mode=None)


@app.callback()
def options() -> None:
    pass


@app.command()
def sizes(
    model: Annotated[list[str] | None, typer.Option(help="Only these models (repeat); default all.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights, for their bytes.")] = "bfloat16",
    as_json: Json = False,
) -> None:
    """Parameters, bytes and FLOPs of the paper's models before and after. Needs no weights."""
    from moepress.checkpoint.sizes import human_size
    from moepress.paper.sizes import NOTE, paper_sizes

    rows = paper_sizes(model, dtype=dtype)
    if as_json:
        print_json([row.to_dict() for row in rows])
        return
    columns = ["method", "stored", "paper: not zero", "S whole", "bytes", "TFLOPs", "paper: TFLOPs"]
    names = list(dict.fromkeys(row.model for row in rows))
    for name in names:
        cells = [
            [
                row.method,
                f"{row.parameters / 1e6:,.1f} M",
                row.paper_parameters,
                f"{row.whole_parameters / 1e6:,.1f} M",
                human_size(row.bytes),
                f"{row.tflops:.2f}",
                f"{row.paper_tflops:.2f}",
            ]
            for row in rows
            if row.model == name
        ]
        print_table(name, columns, cells, NOTE if name == names[-1] else "")
