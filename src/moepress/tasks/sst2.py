"""SST-2: is a sentence positive or negative?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moepress.tasks.base import TASKS, Example, Task, clipped


@TASKS.register("sst2")
@dataclass(frozen=True)
class Sst2(Task):
    """GLUE SST-2 with the prompt of the MC-SMoE paper (promptsource, "positive negative after")."""

    fields = ("sentence", "label")
    hub = ("nyu-mll/glue", "sst2")

    def example(self, record: Mapping[str, Any]) -> Example:
        if record["label"] not in (0, 1):
            raise ValueError(f"label must be 0 (negative) or 1 (positive), not {record['label']!r}")
        sentence = clipped(record["sentence"])
        prompt = f"{sentence}\nQuestion: Was that sentence positive or negative? Answer:"
        return Example(prompt.strip(), ("negative", "positive"), int(record["label"]))
