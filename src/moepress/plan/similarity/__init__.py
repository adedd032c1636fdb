"""Which experts are alike. One method a file."""

from moepress.plan.similarity import (  # noqa: F401 - registration
    expert_feature,
    expert_gradient,
    expert_weight,
    expert_weight_feature,
    gated_output,
    mean_output,
    random,
    router_logits,
    router_weight,
)
from moepress.plan.similarity.base import SIMILARITIES, Similarity

__all__ = ["SIMILARITIES", "Similarity"]
