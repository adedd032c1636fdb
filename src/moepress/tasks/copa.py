"""COPA: which of two sentences is the cause or the effect of another?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moepress.tasks.base import TASKS, Example, Task, label_of, text_of

ASKED = {"cause": "a cause", "effect": "an effect"}


@TASKS.register("copa")
@dataclass(frozen=True)
class Copa(Task):
    """SuperGLUE COPA with the prompt of the MC-SMoE paper (promptsource, "best_option")."""

    fields = ("premise", "choice1", "choice2", "question", "label")
    hub = ("aps/super_glue", "copa")

    def example(self, record: Mapping[str, Any]) -> Example:
        if record["question"] not in ASKED:
            raise ValueError(f"question must be cause or effect, not {record['question']!r}")
        choices = text_of(record, "choice1"), text_of(record, "choice2")
        # The template really has two spaces in its last line, and one at the end of its first.
        prompt = (
            f"{text_of(record, 'premise')} \n\nWhat's the best option?\n- {choices[0]}\n- {choices[1]}\n\n"
            f"We are looking for  {ASKED[record['question']]}"
        )
        return Example(prompt.strip(), choices, label_of(record, choices))
