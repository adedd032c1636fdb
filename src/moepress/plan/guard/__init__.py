"""Which experts must be left alone, whatever their score says. One method a file."""

from moepress.plan.guard import exceptional, nobody, rare_experts, super_experts  # noqa: F401 - registration
from moepress.plan.guard.base import GUARDS, Guard

__all__ = ["GUARDS", "Guard"]
