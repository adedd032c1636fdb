"""Which rows a table has, and what a cell of it is called."""

from __future__ import annotations

import json
from typing import Any

from moepress.paper.tables import TABLES, Quality, Row


def parts_of(table: str) -> tuple[Quality, ...]:
    made = TABLES[table]
    return (made,) if isinstance(made, Quality) else made.parts


def rows_of(table: str, dense: bool = False) -> list[Row]:
    """Those of all parts, equal ones once; the dense model only if there is one."""
    return list(
        {row_key(row): row for part in parts_of(table) for row in part.measured if dense or not row.dense}.values()
    )


def ours_of(table: str) -> dict[str, Any]:
    """The recipe that the paper argues for."""
    part = parts_of(table)[0]
    return dict(next(row.recipe for row in part.rows if row.name == part.ours and row.recipe is not None))


def row_key(row: Row) -> str:
    """What is done to the model: rows of two tables that do the same are one."""
    if row.recipe is None:
        return "zeroed" if row.zeroed else "dense" if row.dense else "full"
    how = ({"schedule": row.schedule} if row.schedule else {}) | ({"dies_out": True} if row.dies_out else {})
    return json.dumps({**row.recipe, **how, **row.training}, sort_keys=True)


def cell_key(row: Row, column: str, seed: int) -> str:
    return f"{column} | seed {seed} | {row_key(row)}"
