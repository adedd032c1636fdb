"""WikiQA: does a sentence answer a question?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moepress.tasks.base import TASKS, Example, Task, label_of, text_of

CHOICES = ("No", "Yes")


@TASKS.register("wikiqa")
@dataclass(frozen=True)
class WikiQa(Task):
    """WikiQA with the prompt of the MC-SMoE paper (promptsource, "Decide_good_answer"). Copies of the data that have
    lost `document_title` get the prompt without it."""

    fields = ("question", "answer", "label")
    hub = ("microsoft/wiki_qa", None)
    metrics = ("accuracy", "f1")

    def example(self, record: Mapping[str, Any]) -> Example:
        about = f" about {text_of(record, 'document_title')}" if "document_title" in record else ""
        prompt = (
            f"This is a correct answer to the following question{about}. Yes or no?\n"
            f"Answer: {text_of(record, 'answer')}\nQuestion: {text_of(record, 'question')}"
        )
        return Example(prompt.strip(), CHOICES, label_of(record, CHOICES))
