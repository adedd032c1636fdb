"""What a labelled task is to the rest of moepress."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from moepress.registry import Registry

LONGEST_FIELD = 2048


@dataclass(frozen=True)
class Example:
    """One labelled example: a prompt, the answers it may have, and which of them is right."""

    prompt: str
    choices: tuple[str, ...]
    label: int
    references: tuple[str, ...] = ()
    """All answers that are right, where the model writes its own."""

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
    kind: ClassVar[Literal["choice", "written"]] = "choice"
    """Whether the model chooses among answers or writes its own."""
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    """What is measured, the one that counts first."""

    @abstractmethod
    def example(self, record: Mapping[str, Any]) -> Example:
        """Raises ValueError, saying what is wrong, for a record that is not labelled as it should be."""

    def examples(self, record: Mapping[str, Any]) -> Sequence[Example]:
        """One record may hold several."""
        return [self.example(record)]

    def missing(self, record: Mapping[str, Any]) -> str | None:
        """The first field that a record should have and has not."""
        return next((field for field in self.fields if field not in record), None)


TASKS: Registry[Task] = Registry("task")


def clipped(text: str) -> str:
    """A field as promptsource fills it in: surplus words beyond 2048 characters are left out."""
    if len(text) <= LONGEST_FIELD + 5:  # its template engine leaves a short surplus standing
        return text
    return text[: LONGEST_FIELD - 3].rsplit(" ", 1)[0] + "..."


def text_of(record: Mapping[str, Any], field: str) -> str:
    """A field as it stands in a prompt."""
    if not isinstance(record[field], str):
        raise ValueError(f"{field} must be a text, not {record[field]!r}")
    return clipped(record[field])


def label_of(record: Mapping[str, Any], names: Sequence[str], field: str = "label") -> int:
    """The number of a choice; splits without labels often have -1 there."""
    value = record[field]
    if type(value) is not int or not 0 <= value < len(names):
        meant = " or ".join(f"{i} ({name})" for i, name in enumerate(names))
        raise ValueError(f"{field} must be {meant}, not {value!r}")
    return value
