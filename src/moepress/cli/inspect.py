from __future__ import annotations

from typing import Annotated

import typer

from moepress.cli.output import Json, print_json, print_table


def inspect(
    model: Annotated[str, typer.Argument(help="A folder or a Hub name.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub model.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the model.")] = False,
    as_json: Json = False,
) -> None:
    """Layers, experts, sizes and router of a model. What would be refused, and why. Reads no weights."""
    from moepress.inspection import inspect_model

    seen = inspect_model(model, trust_remote_code=trust_remote_code, revision=revision)
    if as_json:
        print_json(seen.to_dict())
        return
    if not seen.layers:
        typer.echo(f"{model}: {seen.architecture}, {seen.note()}")
        return
    columns = ["layer", "experts", "top-k", "hidden units", "parameters", "router"]
    rows = [
        [
            layer.name,
            str(layer.experts) if layer.physical == layer.experts else f"{layer.experts} → {layer.physical}",
            str(layer.top_k),
            str(layer.hidden_units),
            f"{layer.parameters:,}",
            layer.refused or layer.router,
        ]
        for layer in seen.layers
    ]
    print_table(f"{model}: {seen.architecture}", columns, rows, seen.note())
