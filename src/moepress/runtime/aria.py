"""Aria's experts choose for themselves in transformers up to 5.17, inside of their own forward."""

from __future__ import annotations

from torch import Tensor
from transformers.models.aria.modeling_aria import AriaExperts

from moepress.runtime.redirect import redirected


class CompactAriaExperts(AriaExperts):
    def route_tokens_to_experts(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        index_TK, weight_TK = super().route_tokens_to_experts(router_logits)
        return redirected(self, index_TK), weight_TK
