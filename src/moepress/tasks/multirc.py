"""MultiRC: is an answer to a question about a paragraph correct? Several may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moepress.tasks.base import TASKS, Example, Task, label_of, text_of

CHOICES = ("No", "Yes")


@TASKS.register("multirc")
@dataclass(frozen=True)
class MultiRc(Task):
    """SuperGLUE MultiRC with the prompt of the MC-SMoE paper (promptsource, "found_this_answer"). A record is one
    answer, as on the Hub, or a passage with its questions and their answers, as in SuperGLUE's own files."""

    fields = ("paragraph", "question", "answer", "label")
    hub = ("aps/super_glue", "multirc")
    metrics = ("f1", "accuracy")

    def example(self, record: Mapping[str, Any]) -> Example:
        prompt = (
            f"{text_of(record, 'paragraph')}\n\nQuestion: {text_of(record, 'question')}\n"
            f'I found this answer "{text_of(record, "answer")}". Is that correct? Yes or no?'
        )
        return Example(prompt.strip(), CHOICES, label_of(record, CHOICES))

    def examples(self, record: Mapping[str, Any]) -> Sequence[Example]:
        if "passage" not in record:
            return [self.example(record)]
        return [self.example(answer) for answer in _answers(record)]

    def missing(self, record: Mapping[str, Any]) -> str | None:
        if "passage" not in record:
            return super().missing(record)
        passage = record["passage"]
        if absent := next((field for field in ("text", "questions") if field not in passage), None):
            return f"passage.{absent}"
        return next(
            (field for answer in _answers(record) for field in self.fields if field not in answer),
            None,
        )


def _answers(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answers of a passage, each as a record of its own."""
    passage, flat = record["passage"], []
    for question in passage["questions"]:
        for answer in question.get("answers", [{}]):
            own = {"paragraph": passage["text"]}
            own |= {"question": question["question"]} if "question" in question else {}
            own |= {"answer": answer["text"]} if "text" in answer else {}
            flat.append(own | ({"label": answer["label"]} if "label" in answer else {}))
    return flat
