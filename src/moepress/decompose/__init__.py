"""W = UV + S: a low rank, and the few columns of the rest that matter most."""

from moepress.decompose.gradual import GradualPruning
from moepress.decompose.importance import Importance
from moepress.decompose.schedule import Schedule

__all__ = ["GradualPruning", "Importance", "Schedule"]
