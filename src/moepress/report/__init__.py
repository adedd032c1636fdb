"""One page that shows what was done to a model, made from saved values only."""

from moepress.report.records import (
    RECORDS,
    SIMILARITY,
    add_evaluation,
    clear,
    has_records,
    records_beside,
    records_of,
)
from moepress.report.report import draw_report

__all__ = [
    "RECORDS",
    "SIMILARITY",
    "add_evaluation",
    "clear",
    "draw_report",
    "has_records",
    "records_beside",
    "records_of",
]
