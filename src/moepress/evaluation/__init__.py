"""How good a model is, and how near to its original."""

from moepress.evaluation.precision import evaluating, in_dtype
from moepress.evaluation.scores import Comparison, TaskScore, TextScore
from moepress.evaluation.task import task_metrics
from moepress.evaluation.text import compare, perplexity

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
