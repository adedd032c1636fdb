from __future__ import annotations

import dataclasses
from typing import Any

import typer

from moepress.cli.output import Json, print_json


def methods(as_json: Json = False) -> None:
    """Every method and component. What it does, its parameters, its paper."""
    from moepress.methods import METHODS
    from moepress.recipe import PLACES

    listing: dict[str, list[dict[str, Any]]] = {"method": [describe(cls) for _, cls in METHODS]}
    for place, registry in PLACES.items():
        listing[place] = [describe(cls) for _, cls in registry]
    if as_json:
        print_json(listing)
        return
    for place, entries in listing.items():
        typer.secho(f"\n{place}", bold=True)
        for entry in entries:
            parameters = ", ".join(f"{name}={default!r}" for name, default in entry.get("parameters", {}).items())
            typer.echo(f"  {entry['name']}{f' ({parameters})' if parameters else ''}: {entry['summary']}")
            if entry["presets"]:
                typer.echo(f"    presets: {', '.join(entry['presets'])}")
            if entry["paper"]:
                typer.echo(f"    {entry['paper']}")


def describe(cls: Any) -> dict[str, Any]:
    parameters = {}
    if dataclasses.is_dataclass(cls):
        make: Any = cls
        parameters = dataclasses.asdict(make())  # made, since some defaults are components themselves
    return {
        "name": cls.name,
        "summary": " ".join((cls.__doc__ or "").split()),
        "parameters": parameters,
        "presets": sorted(getattr(cls, "presets", {})),
        "paper": cls.paper,
    }
