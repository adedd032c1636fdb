"""JetMoE's router sorts the tokens by expert for two grouped matrices: a redirect has to come before the sorting.

Shape suffixes: E original experts, T tokens, K chosen experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.jetmoe.modeling_jetmoe import JetMoeTopKGating

from moepress.runtime.redirect import redirected


class CompactJetMoeGating(JetMoeTopKGating):
    expert_map_physical: int

    def choose(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Original experts, their gates, and the logits."""
        logits_TE = self.layer(hidden_states).float()
        top_logits_TK, index_TK = logits_TE.topk(self.top_k, dim=1)
        return index_TK, torch.softmax(top_logits_TK, dim=1).type_as(hidden_states), logits_TE

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, list[int], Tensor]:
        index_TK, gate_TK, logits_TE = self.choose(hidden_states)
        expert = redirected(self, index_TK).flatten()
        order = expert.argsort(stable=True)
        counts = nn.functional.one_hot(expert, self.expert_map_physical).sum(dim=0).tolist()
        return order, order.div(self.top_k, rounding_mode="trunc"), gate_TK.flatten()[order], counts, logits_TE
