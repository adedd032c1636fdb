"""What a labelled task is to the rest of moepress."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moepress.registry import Registry

LONGEST_FIELD = 2048


@dataclass(frozen=True)
class Example:
    """One labelled example: a prompt, the answers it may have, and which of them is right."""

    prompt: str
    choices: tuple[str, ...]
    label: int

    @property
    def answer(self) -> str:
        return self.choices[self.label]


@dataclass(frozen=True)
class Task(ABC):
    """One task a file: the prompt and the answers. Register it under the name used in `task:name`."""

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    """What each record must hold."""
    hub: ClassVar[tuple[str, str | None]]
    """Dataset and config on the Hugging Face Hub."""
    separator: ClassVar[str] = " "
    """What stands between prompt and answer where a model reads both as one text."""

    @abstractmethod
    def example(self, record: Mapping[str, Any]) -> Example:
        """Raises ValueError, saying what is wrong, for a record that is not labelled as it should be."""


TASKS: Registry[Task] = Registry("task")


def clipped(text: str) -> str:
    """A field as promptsource fills it in: surplus words beyond 2048 characters are left out."""
    if len(text) <= LONGEST_FIELD + 5:  # its template engine leaves a short surplus standing
        return text
    return text[: LONGEST_FIELD - 3].rsplit(" ", 1)[0] + "..."
