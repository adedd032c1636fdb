"""How many experts each layer keeps. One method a file."""

from moepress.plan.budget import adaptive, overall, uniform  # noqa: F401 - registration
from moepress.plan.budget.base import BUDGETS, Budget, Limits

__all__ = ["BUDGETS", "Budget", "Limits"]
