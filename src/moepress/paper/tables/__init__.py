"""The paper's tables of quality, one a file."""

from __future__ import annotations

from moepress.paper.tables import (
    ablations,
    alignment,
    averaging,
    distillation,
    main,
    merge_or_compress,
    schedules,
    similarities,
    uniform_adaptive,
    zero_shot,
)
from moepress.paper.tables.base import Quality, Row, Several

MODULES = (
    main,
    uniform_adaptive,
    similarities,
    distillation,
    alignment,
    merge_or_compress,
    averaging,
    zero_shot,
    schedules,
    ablations,
)
TABLES: dict[str, Quality | Several] = {module.TABLE.name: module.TABLE for module in MODULES}  # type: ignore[attr-defined]

__all__ = ["TABLES", "Quality", "Row", "Several"]
