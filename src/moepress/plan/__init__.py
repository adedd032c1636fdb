"""Decide which experts lead, which follow and which go."""

from moepress.plan.budget import BUDGETS, Budget, Limits
from moepress.plan.facts import LayerFacts
from moepress.plan.grouping import GROUPINGS, Grouping, strongest
from moepress.plan.guard import GUARDS, Guard
from moepress.plan.make import Planner
from moepress.plan.plan import Group, LayerPlan, Plan
from moepress.plan.saliency import SALIENCIES, Saliency
from moepress.plan.similarity import SIMILARITIES, Similarity

__all__ = [
    "BUDGETS",
    "GROUPINGS",
    "GUARDS",
    "SALIENCIES",
    "SIMILARITIES",
    "Budget",
    "Group",
    "Grouping",
    "Guard",
    "LayerFacts",
    "LayerPlan",
    "Limits",
    "Plan",
    "Planner",
    "Saliency",
    "Similarity",
    "strongest",
]
