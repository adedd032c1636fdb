"""NLLB-MoE experts that do what the router says.

transformers 5 hands its NLLB experts a one-hot mask where indices are expected: whatever the router chooses, expert 1
serves every token's first choice and expert 0 its second, and no other expert is ever used. Here each expert serves
the tokens whose gate it has, as in fairseq and in transformers 4. The router stays native, and with it the capacity.

Shape suffixes: E experts, D width, T tokens, K chosen per token, n rows in the order of their experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import NllbMoeConfig
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeExperts

from moepress.runtime import become
from moepress.runtime.modules import ModuleBank
from moepress.runtime.serve import Experts, Groups, serve

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


@dataclass(frozen=True)
class _Scaled:
    """The experts with what NLLB does to their output: dropout in training, its mean otherwise."""

    bank: Experts
    owner: Any

    @property
    def experts(self) -> int:
        return self.bank.experts

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.bank.sizes

    def one(self, e: int, x_nD: Tensor) -> Tensor:
        return self._scaled(self.bank.one(e, x_nD))

    def together(self, x_nD: Tensor, groups: Groups) -> Tensor:
        return self._scaled(self.bank.together(x_nD, groups))

    def _scaled(self, y_nD: Tensor) -> Tensor:
        return self.owner.token_dropout(y_nD) if self.owner.training else y_nD * (1 - self.owner.moe_token_dropout)


class RoutedNllbExperts(NllbMoeExperts):
    """Each physical expert runs once, on the tokens of all original experts that it stands for."""

    def bank(self) -> Experts:
        return ModuleBank([self[f"expert_{e}"] for e in range(self.num_experts)], "fc1", "fc2")

    def forward(self, hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor) -> Tensor:
        gate_TE, table = router_probs, getattr(self, "expert_map", None)
        if isinstance(table, Tensor):
            physical_TE = gate_TE.new_zeros(gate_TE.shape[0], self.num_experts)
            gate_TE = physical_TE.index_add(1, table, gate_TE)
        gate_TK, index_TK = gate_TE.topk(min(2, self.num_experts), dim=-1)
        index_TK = index_TK.masked_fill(gate_TK <= 0, self.num_experts)  # over capacity, or both choices were one
        return serve(_Scaled(self.bank(), self), hidden_states, index_TK, gate_TK)


def repair(experts: nn.Module) -> bool:
    """Whether there was anything to put right."""
    if native_is_right() or isinstance(experts, RoutedNllbExperts):
        return False
    become(experts, RoutedNllbExperts)
    return True
