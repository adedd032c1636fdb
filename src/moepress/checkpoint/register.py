"""Make transformers know compact checkpoints, moepress' way to run experts and the models that it has no class for,
without paying for its import.

transformers takes seconds to import. So each of our modules that adds to one of its tables is imported right after
that table has been, whoever imports it, and at once if it already is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

TABLES = {
    "transformers.quantizers.auto": "moepress.checkpoint.quantizer",
    "transformers.integrations.moe": "moepress.runtime.fused",
    "transformers.models.auto.configuration_auto": "moepress.fairseq.register",
}


class _AfterTable(MetaPathFinder):
    """Finds nothing itself: it waits for the import of a table and adds one to it."""

    def __init__(self, table: str) -> None:
        self.table = table

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.table:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                importlib.import_module(TABLES[fullname])

            loader.exec_module = execute_and_register
        return spec


def register() -> None:
    waiting = {finder.table for finder in sys.meta_path if isinstance(finder, _AfterTable)}
    for table, ours in TABLES.items():
        if table in sys.modules:
            importlib.import_module(ours)
        elif table not in waiting:
            sys.meta_path.insert(0, _AfterTable(table))
