"""Put charts and tables together to one page that needs nothing else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from moepress.bench.results import Table
from moepress.report.chart import Drawn
from moepress.report.style import DARK, LIGHT, css_variables


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page."""

    label: str
    number: str
    words: str = ""


@dataclass(frozen=True)
class Choice:
    """Charts of which one group is shown at a time."""

    label: str
    options: Sequence[tuple[str, Sequence[Drawn]]]
    words: str = ""


@dataclass(frozen=True)
class Details:
    """Text that is folded up."""

    title: str
    text: str


@dataclass(frozen=True)
class Section:
    title: str
    words: str = ""
    charts: Sequence[Drawn] = ()
    choice: Choice | None = None
    tables: Sequence[Table] = ()
    details: Sequence[Details] = ()
    command: str = ""


@dataclass(frozen=True)
class Page:
    title: str
    kicker: str
    lead: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    command: str
    footer: str
    notes: Sequence[str] = field(default_factory=tuple)

    def write(self, file: Path) -> Path:
        from jinja2 import Environment, FunctionLoader, StrictUndefined

        def source(name: str) -> str:
            return (files("moepress.report") / "templates" / name).read_text(encoding="utf-8")

        environment = Environment(
            loader=FunctionLoader(source),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        html = environment.get_template("page.html").render(
            page=self,
            light=css_variables(LIGHT),
            dark=css_variables(DARK),
            style=source("page.css"),
            script=source("page.js"),
        )
        partial = file.with_name(f".{file.name}")
        partial.write_text(html, encoding="utf-8")
        os.replace(partial, file)
        return file
