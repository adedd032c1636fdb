"""SQuAD v1.1: an answer out of a passage, in the model's own writing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moepress.tasks.base import TASKS, Example, Task, text_of


@TASKS.register("squad")
@dataclass(frozen=True)
class Squad(Task):
    """SQuAD v1.1 with the prompt of the MC-SMoE paper (promptsource, "answer_given_context_and_question")."""

    fields = ("context", "question", "answers")
    hub = ("rajpurkar/squad", None)
    kind = "written"
    metrics = ("f1", "exact_match")

    def example(self, record: Mapping[str, Any]) -> Example:
        references = tuple(record["answers"]["text"])
        if not references or not all(isinstance(text, str) for text in references):
            raise ValueError(f"answers.text must hold at least one text, not {list(references)!r}")
        prompt = (
            f"{text_of(record, 'context')}\n\nQ: {text_of(record, 'question')}\n\n"
            "Referring to the passage above, the correct answer to the given question is"
        )
        return Example(prompt.strip(), references[:1], 0, references)
