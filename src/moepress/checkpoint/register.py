"""Make `from_pretrained` know compact checkpoints, without paying for the import of transformers.

transformers takes seconds to import. So the quantizer is registered right after transformers' own table of quantizers
has been imported, whoever imports it, and at once if it already is.
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

TABLE = "transformers.quantizers.auto"
QUANTIZER = "moepress.checkpoint.quantizer"


class _AfterTable(MetaPathFinder):
    """Finds nothing itself: it waits for the import of the table and adds one to it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                importlib.import_module(QUANTIZER)

            loader.exec_module = execute_and_register
        return spec


def register() -> None:
    if TABLE in sys.modules:
        importlib.import_module(QUANTIZER)
    elif not any(isinstance(finder, _AfterTable) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTable())
