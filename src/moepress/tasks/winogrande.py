"""WinoGrande: whom does a blank in a sentence stand for?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moepress.tasks.base import TASKS, Example, Task, text_of


@TASKS.register("winogrande")
@dataclass(frozen=True)
class WinoGrande(Task):
    """WinoGrande (size l) with the prompt of the MC-SMoE paper (promptsource, "True or False", in lower case): is it
    the first of the two?"""

    fields = ("sentence", "option1", "option2", "answer")
    hub = ("allenai/winogrande", "winogrande_l")

    def example(self, record: Mapping[str, Any]) -> Example:
        if record["answer"] not in ("1", "2"):
            raise ValueError(f"answer must be the text 1 or 2, not {record['answer']!r}")
        prompt = (
            f"The _ in the sentence below refers to {text_of(record, 'option1')}. True or False?\n"
            f"{text_of(record, 'sentence')}"
        )
        return Example(prompt.strip(), ("true", "false"), int(record["answer"]) - 1)
