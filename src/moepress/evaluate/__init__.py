"""How good a model is, and how near to its original."""

from moepress.evaluate.precision import evaluating, in_dtype
from moepress.evaluate.scores import Comparison, TaskScore, TextScore
from moepress.evaluate.task import task_metrics
from moepress.evaluate.text import compare, perplexity

__all__ = [
    "Comparison",
    "TaskScore",
    "TextScore",
    "compare",
    "evaluating",
    "in_dtype",
    "perplexity",
    "task_metrics",
]
