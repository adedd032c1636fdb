"""The experts of families that store them as two tensors, and `experts_implementation="moepress"` for them.

The contract is transformers' own: an experts module that its `use_experts_implementation` has marked says how its
matrices lie, and any function that is registered may compute with them.

Shape suffixes: E physical experts, D width, T tokens, K chosen per token, n rows in the order of their experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moepress.runtime.grouped import grouped_product
from moepress.runtime.linear import linear
from moepress.runtime.serve import Groups, serve

NAME = "moepress"


@dataclass(frozen=True)
class FusedBank:
    module: Any

    @property
    def experts(self) -> int:
        return self.module.num_experts

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.module.down_proj.shape[1:])

    def one(self, e: int, x_nD: Tensor) -> Tensor:
        def affine(name: str, x_nI: Tensor) -> Tensor:
            w, bias = getattr(self.module, name)[e], getattr(self.module, f"{name}_bias", None)
            return linear(x_nI, w.T if self.module.is_transposed else w, None if bias is None else bias[e])

        return self._through(x_nD, affine)

    def together(self, x_nD: Tensor, groups: Groups) -> Tensor:
        def affine(name: str, x_nI: Tensor) -> Tensor:
            w_E, bias = getattr(self.module, name), getattr(self.module, f"{name}_bias", None)
            w_EIO = w_E if self.module.is_transposed else w_E.transpose(1, 2)
            y_nO = grouped_product(x_nI, w_EIO, groups.ends_E)
            return y_nO if bias is None else groups.quiet(y_nO + bias[groups.expert_n])

        return self._through(x_nD, affine)

    def _through(self, x_nD: Tensor, affine: Any) -> Tensor:
        module = self.module
        if module.has_gate:
            h_nF = module._apply_gate(affine("gate_up_proj", x_nD))
        else:
            h_nF = module.act_fn(affine("up_proj", x_nD))
        y_nD = affine("down_proj", h_nF)
        return module.post_expert_norm(y_nD) if getattr(module, "has_post_expert_norm", False) else y_nD


def moepress_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return serve(FusedBank(self), hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(NAME, moepress_experts_forward)
