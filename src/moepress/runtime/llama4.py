"""Llama 4 multiplies the experts' *input* by the router's score: a merged expert runs once for each original expert
that was chosen, since two scaled inputs cannot be added up beforehand.

Shape suffixes: E original experts, P physical experts, D width, T tokens, K chosen experts.
"""

from __future__ import annotations

from torch import Tensor
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from moepress.runtime.redirect import redirected


class CompactLlama4Moe(Llama4TextMoe):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x_TD = hidden_states.reshape(-1, self.hidden_dim)
        score_TE, logits_TE = self.router(x_TD)
        score_TK, index_TK = score_TE.topk(self.top_k, dim=1)
        expert_TK = redirected(self.experts, index_TK)
        output_TD = self.shared_expert(x_TD)
        for slot in range(self.top_k):
            # As in the native layer every expert sees every token, with zeros for those that did not choose it.
            scale_TP = x_TD.new_zeros(x_TD.shape[0], self.experts.num_experts)
            scale_TP = scale_TP.scatter(1, expert_TK[:, slot, None], score_TK[:, slot, None])
            x_PTD = x_TD * scale_TP.T[:, :, None]
            y_PTD = self.experts(x_PTD.reshape(-1, self.hidden_dim)).reshape(x_PTD.shape)
            output_TD = output_TD + y_PTD.sum(dim=0)
        return output_TD, logits_TE
