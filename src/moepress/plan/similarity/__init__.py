"""Which experts are alike. One method a file."""

from moepress.plan.similarity import (  # noqa: F401 - registration
    expert_feature,
    expert_weight,
    expert_weight_feature,
    random,
    router_logits,
    router_weight,
)
from moepress.plan.similarity.base import SIMILARITIES, Similarity

__all__ = ["SIMILARITIES", "Similarity"]
