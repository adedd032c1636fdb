"""SST-2: is a sentence positive or negative?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moepress.tasks.base import TASKS, Example, Task, label_of, text_of

CHOICES = ("negative", "positive")


@TASKS.register("sst2")
@dataclass(frozen=True)
class Sst2(Task):
    """GLUE SST-2 with the prompt of the MC-SMoE paper (promptsource, "positive negative after")."""

    fields = ("sentence", "label")
    hub = ("nyu-mll/glue", "sst2")

    def example(self, record: Mapping[str, Any]) -> Example:
        prompt = f"{text_of(record, 'sentence')}\nQuestion: Was that sentence positive or negative? Answer:"
        return Example(prompt.strip(), CHOICES, label_of(record, CHOICES))
