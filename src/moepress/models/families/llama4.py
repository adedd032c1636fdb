"""Llama 4: every expert runs on every token, scaled by a score that is zero for those not chosen."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from moepress.models.adapter import Block
from moepress.models.fused import FusedAdapter, Layout
from moepress.models.layer import CompactSpec, Routing
from moepress.models.taps import after_forward
from moepress.runtime import become
from moepress.runtime.factored import FactoredEveryToken
from moepress.runtime.redirect import add_map


class Llama4Adapter(FusedAdapter):
    name = "llama4"
    experts_take_routing = False
    factored_form = FactoredEveryToken

    def layout(self, experts: Block) -> Layout | None:
        native = any(cls.__name__ == "Llama4TextExperts" for cls in type(experts).__mro__)
        return Layout(transposed=True) if native else None

    def redirect(self, block: Block, spec: CompactSpec) -> None:
        from moepress.runtime.llama4 import CompactLlama4Moe

        become(block, CompactLlama4Moe)
        add_map(block.experts, spec.experts, spec.physical)

    def watch(self, block: Block, seen: dict[str, Tensor], stack: ExitStack) -> None:
        def router_scored(args: tuple, output: Any) -> None:
            seen["hidden"] = args[0].reshape(-1, args[0].shape[-1])
            seen["weight"], seen["index"] = output[0].topk(block.top_k, dim=1)

        stack.enter_context(after_forward(block.router, router_scored))

    def routing(self, block: Block, seen: dict[str, Tensor]) -> Routing:
        hidden_TD, scale_TK, index_TK = seen["hidden"], seen["weight"], seen["index"]
        one_TK = torch.ones_like(scale_TK)
        if scale_TK.shape[1] == 1:
            return Routing(hidden_TD * scale_TK, index_TK, one_TK, seen["logits"])
        return Routing(hidden_TD, index_TK, one_TK, seen["logits"], input_scale_TK=scale_TK)
