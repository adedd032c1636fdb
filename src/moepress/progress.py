"""Progress bars with time left; silent unless the command line switches them on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
_visible: ContextVar[bool] = ContextVar("moepress_progress", default=False)


@contextmanager
def show_progress(visible: bool = True) -> Iterator[None]:
    token = _visible.set(visible)
    try:
        yield
    finally:
        _visible.reset(token)


def progress_shown() -> bool:
    return _visible.get()


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate with a progress bar on standard error, if bars are switched on."""
    if not _visible.get():
        yield from items
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    total = len(items) if total is None and hasattr(items, "__len__") else total  # type: ignore[arg-type]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        for item in items:
            yield item
            bar.advance(task)
