"""HotpotQA: a question about facts from several articles, answered in the model's own writing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moepress.tasks.base import TASKS, Example, Task, clipped, text_of


@TASKS.register("hotpotqa")
@dataclass(frozen=True)
class HotpotQa(Task):
    """HotpotQA (distractor) with the prompt of the MC-SMoE paper (promptsource, "generate_answer_affirmative") and, as
    there, only the sentences that the answer rests on; all of them where a record does not say which these are."""

    fields = ("question", "answer", "context")
    hub = ("hotpotqa/hotpot_qa", "distractor")
    kind = "written"
    metrics = ("f1", "exact_match")

    def example(self, record: Mapping[str, Any]) -> Example:
        answer = text_of(record, "answer")
        if not answer:
            raise ValueError("answer is empty")
        # What the template's loop leaves: a line break before and after each paragraph.
        paragraphs = "".join(f"\n  - {clipped(''.join(sentences))}\n" for sentences in _paragraphs(record))
        prompt = (
            f'Answer the following question, "{text_of(record, "question")}", using the information provided below.'
            f"\n\n{paragraphs}"
        )
        return Example(prompt.strip(), (answer,), 0, (answer,))


def _paragraphs(record: Mapping[str, Any]) -> list[list[str]]:
    """The sentences that count, by article; in the form of the Hub (columns) or of the original files (pairs)."""
    context, facts = record["context"], record.get("supporting_facts")
    articles = list(zip(context["title"], context["sentences"])) if isinstance(context, Mapping) else context
    if facts is None:
        return [list(sentences) for _, sentences in articles]
    pairs = zip(facts["title"], facts["sent_id"]) if isinstance(facts, Mapping) else facts
    wanted = {(title, number) for title, number in pairs}
    chosen = [[s for i, s in enumerate(sentences) if (title, i) in wanted] for title, sentences in articles]
    return [sentences for sentences in chosen if sentences]
