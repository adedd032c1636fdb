"""The paper's tables of quality, one a file."""

from __future__ import annotations

from moepress.paper.tables import ablations, alignment, averaging, similarities, uniform_adaptive
from moepress.paper.tables.base import Quality, Row, Several

TABLES: dict[str, Quality | Several] = {
    module.TABLE.name: module.TABLE for module in (uniform_adaptive, similarities, alignment, averaging, ablations)
}

__all__ = ["TABLES", "Quality", "Row", "Several"]
