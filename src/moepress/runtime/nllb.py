"""NLLB-MoE experts that do what the router says.

transformers 5 hands its NLLB experts a one-hot mask where indices are expected: whatever the router chooses, expert 1
serves every token's first choice and expert 0 its second, and no other expert is ever used. Here each expert serves
the tokens whose gate it has, as in fairseq and in transformers 4. The router stays native, and with it the capacity.

Shape suffixes: E original experts, D width, T tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import NllbMoeConfig
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeExperts

from moepress.runtime import become

WRONG = (
    "this version of transformers runs NLLB-MoE with its experts 0 and 1 only, whatever the router chooses; "
    "moepress has put this right in the loaded model"
)


@cache
def native_is_right() -> bool:
    """Found by asking: three experts that output their own number, and a token for the last of them."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        config = NllbMoeConfig(d_model=2, num_experts=3, moe_token_dropout=0.0, activation_dropout=0.0)
        experts = NllbMoeExperts(config, 2).eval()
        for e in range(3):
            expert: Any = experts[f"expert_{e}"]
            expert.fc2.weight.zero_()
            expert.fc2.bias.fill_(float(e))
        chosen_TE = torch.tensor([[0, 0, 1]])
        output = experts(torch.zeros(1, 2), chosen_TE, chosen_TE.float())
    return bool((output == 2).all())


class RoutedNllbExperts(NllbMoeExperts):
    """Each physical expert runs once, on the tokens of all original experts that it stands for."""

    def one(self, e: int, x_nD: Tensor) -> Tensor:
        return self[f"expert_{e}"](x_nD)

    def forward(self, hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor) -> Tensor:
        gate_TE, table = router_probs, getattr(self, "expert_map", None)
        if isinstance(table, Tensor):
            physical_TE = gate_TE.new_zeros(gate_TE.shape[0], self.num_experts)
            gate_TE = physical_TE.index_add(1, table, gate_TE)
        output_TD = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            token_n = gate_TE[:, e].nonzero()[:, 0]
            if token_n.numel() == 0:
                continue
            y_nD = self.one(e, hidden_states[token_n])
            y_nD = self.token_dropout(y_nD) if self.training else y_nD * (1 - self.moe_token_dropout)
            output_TD.index_add_(0, token_n, (y_nD * gate_TE[token_n, e, None]).to(output_TD.dtype))
        return output_TD


def repair(experts: nn.Module) -> bool:
    """Whether there was anything to put right."""
    if native_is_right() or isinstance(experts, RoutedNllbExperts):
        return False
    become(experts, RoutedNllbExperts)
    return True
