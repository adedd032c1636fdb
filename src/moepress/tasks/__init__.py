"""Labelled tasks: how their records become prompts and answers. They know no files and no models."""

from moepress.tasks import sst2  # noqa: F401 - registers itself
from moepress.tasks.base import TASKS, Example, Task

__all__ = ["TASKS", "Example", "Task"]
