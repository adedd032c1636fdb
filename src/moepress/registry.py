"""Named things: methods, statistics, adapters. A wrong name fails with a suggestion."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from moepress.errors import MoepressError


def did_you_mean(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a name to a class. `kind` is the word used in error messages ("similarity", "budget", …)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        def add(cls: type[T]) -> type[T]:
            if name in self._entries:
                raise RuntimeError(f"{self.kind} {name!r} is registered twice")
            cls.name = name  # type: ignore[attr-defined]
            self._entries[name] = cls
            return cls

        return add

    def get(self, name: str) -> type[T]:
        if name not in self._entries:
            raise MoepressError(f"unknown {self.kind} {name!r}: {did_you_mean(name, list(self._entries))}")
        return self._entries[name]

    def create(self, name: str, **parameters: Any) -> T:
        return self.get(name)(**parameters)

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __iter__(self) -> Iterator[tuple[str, type[T]]]:
        return iter(sorted(self._entries.items()))


def linked(papers: str) -> str:
    """The addresses in a component's `paper` as links of Markdown."""
    return re.sub(r"((?:^|, )(?:and |after )*)([^,]+), (https://[^,\s]+)", r"\1[\2](\3)", papers)
