"""One kind of figure a file: saved values in, a `Chart` out, or nothing where the values are not there."""

from moepress.report.figures.budget import budget
from moepress.report.figures.by_layer import alignment_gap, output_error
from moepress.report.figures.decomposed import remaining, stable_rank
from moepress.report.figures.groups import groups
from moepress.report.figures.quality import by_domain
from moepress.report.figures.similarity import similarity
from moepress.report.figures.size import size
from moepress.report.figures.time import time
from moepress.report.figures.usage import usage

__all__ = [
    "alignment_gap",
    "budget",
    "by_domain",
    "groups",
    "output_error",
    "remaining",
    "similarity",
    "size",
    "stable_rank",
    "time",
    "usage",
]
