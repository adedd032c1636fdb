"""Which rows a table has, and what a cell of it is called."""

from __future__ import annotations

import json
from typing import Any

from moepress.paper.tables import TABLES, Quality, Row


def parts_of(table: str) -> tuple[Quality, ...]:
    made = TABLES[table]
    return (made,) if isinstance(made, Quality) else made.parts


def rows_of(table: str) -> list[Row]:
    """Those of all parts, equal ones once."""
    return list({row_key(row): row for part in parts_of(table) for row in part.measured}.values())


def ours_of(table: str) -> dict[str, Any]:
    """The recipe that the paper argues for."""
    part = parts_of(table)[0]
    return dict(next(row.recipe for row in part.rows if row.name == part.ours and row.recipe is not None))


def row_key(row: Row) -> str:
    """What is done to the model: rows of two tables that do the same are one."""
    return "zeroed" if row.zeroed else "full" if row.recipe is None else json.dumps(dict(row.recipe), sort_keys=True)


def cell_key(row: Row, column: str, seed: int) -> str:
    return f"{column} | seed {seed} | {row_key(row)}"
