"""Labelled tasks: how their records become prompts and answers. They know no files and no models."""

from moepress.tasks import copa, hotpotqa, mrpc, multirc, openbookqa, squad, sst2, wikiqa, winogrande  # noqa: F401
from moepress.tasks.base import TASKS, Example, Task

__all__ = ["TASKS", "Example", "Task"]
