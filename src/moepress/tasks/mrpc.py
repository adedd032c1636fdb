"""MRPC: do two sentences mean the same?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moepress.tasks.base import TASKS, Example, Task, label_of, text_of

CHOICES = ("no", "yes")


@TASKS.register("mrpc")
@dataclass(frozen=True)
class Mrpc(Task):
    """GLUE MRPC with the prompt of the MC-SMoE paper (promptsource, "paraphrase")."""

    fields = ("sentence1", "sentence2", "label")
    hub = ("nyu-mll/glue", "mrpc")
    metrics = ("accuracy", "f1")

    def example(self, record: Mapping[str, Any]) -> Example:
        prompt = (
            f"Does the sentence\n{text_of(record, 'sentence1')}\n"
            f"paraphrase (that is, mean the same thing as) this sentence?\n{text_of(record, 'sentence2')}"
        )
        return Example(prompt.strip(), CHOICES, label_of(record, CHOICES))
