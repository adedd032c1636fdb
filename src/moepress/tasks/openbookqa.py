"""OpenBookQA: which of four answers is right?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moepress.tasks.base import TASKS, Example, Task, clipped, text_of


@TASKS.register("openbookqa")
@dataclass(frozen=True)
class OpenBookQa(Task):
    """OpenBookQA with the prompt of the MC-SMoE paper (promptsource, "pick_answer_with_options")."""

    fields = ("question_stem", "choices", "answerKey")
    hub = ("allenai/openbookqa", "main")

    def example(self, record: Mapping[str, Any]) -> Example:
        choices = tuple(map(clipped, record["choices"]["text"]))
        letters = list(record["choices"]["label"])
        if len(choices) != len(letters) or record["answerKey"] not in letters:
            raise ValueError(f"answerKey must be one of {', '.join(map(str, letters))}, not {record['answerKey']!r}")
        options = "\n".join(f"- {choice}" for choice in choices)
        prompt = f"{text_of(record, 'question_stem')}\n\nPick the right answer from the list:\n{options}"
        return Example(prompt.strip(), choices, letters.index(record["answerKey"]))
