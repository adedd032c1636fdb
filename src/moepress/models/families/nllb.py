"""NLLB-MoE: two experts per token, and tokens dropped when an expert is full; the router is left as it is."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from moepress.models.adapter import Block
from moepress.models.layer import CompactSpec, Routing
from moepress.models.moduledict import ModuleDictAdapter
from moepress.models.taps import before_forward
from moepress.runtime import become
from moepress.runtime.factors import ExpertFactors
from moepress.runtime.redirect import add_map


class NllbAdapter(ModuleDictAdapter):
    name = "nllb-moe"
    experts_take_routing = False
    first, second = "fc1", "fc2"
    watched = frozenset({"hidden", "gate", "logits"})

    def matches(self, block: Block) -> bool:
        return super().matches(block) and hasattr(getattr(block, "router", None), "second_expert_policy")

    def refusal(self, block: Block) -> str | None:
        if block.router.second_expert_policy != "all":
            return f"its second expert is drawn at random (second_expert_policy={block.router.second_expert_policy!r})"
        return super().refusal(block)

    def repair(self, block: Block) -> str | None:
        from moepress.runtime.nllb import WRONG, repair

        return WRONG if repair(block.experts) else None

    def top_k(self, block: Block) -> int:
        return 2

    def capacity(self, block: Block) -> int | None:
        # Otherwise it is a share of the tokens at hand, computed by the router in each call.
        return block.router.expert_capacity if block.router.moe_eval_capacity_token_fraction <= 0 else None

    def redirect(self, block: Block, spec: CompactSpec) -> None:
        from moepress.runtime.nllb import RoutedNllbExperts

        become(block.experts, RoutedNllbExperts)
        add_map(block.experts, spec.experts, spec.physical)

    def factor(self, block: Block, spec: CompactSpec) -> ExpertFactors:
        from moepress.runtime.nllb import RoutedNllbExperts

        if not isinstance(block.experts, RoutedNllbExperts):
            become(block.experts, RoutedNllbExperts)
        return super().factor(block, spec)

    def reshape_experts(self, block: Block, spec: CompactSpec) -> None:
        super().reshape_experts(block, spec)
        self.repair(block)

    def watch(self, block: Block, seen: dict[str, Tensor], stack: ExitStack) -> None:
        def experts_called(args: tuple, kwargs: dict) -> None:
            hidden, _, gate = (*args, *kwargs.values())
            seen["hidden"], seen["gate"] = hidden, gate

        stack.enter_context(before_forward(block.experts, experts_called))

    def observe(self, block: Block, run: Any) -> tuple[Any, Routing]:
        self.repair(block)
        return super().observe(block, run)

    def routing(self, block: Block, seen: dict[str, Tensor]) -> Routing:
        # The gates tell who serves a token. A choice that found its expert full has no gate: the logits name it.
        logits_TE, gate_TE = seen["logits"], seen["gate"]
        dtype = seen["hidden"].dtype
        first_T = logits_TE.softmax(dim=-1, dtype=block.router.dtype).to(dtype).argmax(dim=-1, keepdim=True)
        second_T = logits_TE.scatter(1, first_T, float("-inf")).argmax(dim=-1, keepdim=True)
        index_TK = torch.cat([first_T, second_T], dim=1)
        served = gate_TE.topk(2, dim=-1)
        index_TK = torch.where((served.values > 0).all(dim=-1, keepdim=True), served.indices, index_TK)
        weight_TK = gate_TE.gather(1, index_TK) * (1 - block.experts.moe_token_dropout)
        return Routing(seen["hidden"], index_TK, weight_TK, logits_TE)
