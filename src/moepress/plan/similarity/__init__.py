"""Which experts are alike. One method a file."""

from moepress.plan.similarity import expert_weight, random, router_logits, router_weight  # noqa: F401 - registration
from moepress.plan.similarity.base import SIMILARITIES, Similarity

__all__ = ["SIMILARITIES", "Similarity"]
