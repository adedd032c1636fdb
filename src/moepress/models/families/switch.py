"""Switch Transformer: one expert per token, and a capacity whose meaning changed between transformers' versions."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moepress.models.adapter import Block
from moepress.models.layer import CompactSpec, RouterView, Routing
from moepress.models.moduledict import ModuleDictAdapter
from moepress.models.taps import after_forward
from moepress.runtime import become
from moepress.runtime.factors import ExpertFactors
from moepress.runtime.redirect import add_map


class SwitchAdapter(ModuleDictAdapter):
    name = "switch"
    experts_take_routing = False
    first, second = "wi", "wo"
    watched = frozenset({"hidden", "weight", "logits"})

    def matches(self, block: Block) -> bool:
        return super().matches(block) and hasattr(getattr(block, "router", None), "ignore_padding_tokens")

    def top_k(self, block: Block) -> int:
        return 1

    def capacity(self, block: Block) -> int | None:
        from moepress.runtime.switch import CompactSwitchRouter, native_rules

        counted = isinstance(block.router, CompactSwitchRouter) or native_rules().capacity
        return block.router.expert_capacity if counted else None

    def takes_capacity(self, block: Block) -> bool:
        return True

    def read_router(self, block: Block) -> RouterView:
        view = super().read_router(block)
        return view if view.capacity is None else replace(view, rule=f"{view.rule}, capacity")

    def reshape_router(self, block: Block, k: int) -> None:
        super().reshape_router(block, k)
        self._own(block)

    def redirect(self, block: Block, spec: CompactSpec) -> None:
        self._own(block)
        add_map(block.router, spec.experts, spec.physical)

    def _own(self, block: Block) -> None:
        from moepress.runtime.switch import CompactSwitchMLP, CompactSwitchRouter

        become(block, CompactSwitchMLP)
        become(block.router, CompactSwitchRouter)

    def factor(self, block: Block, spec: CompactSpec) -> ExpertFactors:
        self._own(block)
        block.router.expert_capacity = spec.capacity
        return super().factor(block, spec)

    def reshape_experts(self, block: Block, spec: CompactSpec) -> None:
        super().reshape_experts(block, spec)
        block.router.expert_capacity = spec.capacity

    def watch(self, block: Block, seen: dict[str, Tensor], stack: ExitStack) -> None:
        from moepress.runtime.switch import CompactSwitchRouter, native_choice

        def router_chose(args: tuple, output: Any) -> None:
            seen["hidden"] = args[0].reshape(-1, args[0].shape[-1])
            if isinstance(block.router, CompactSwitchRouter):
                index, weight = output[0], output[1]
                seen["index"], seen["weight"] = index.reshape(-1, 1), weight.reshape(-1, 1)
            else:
                seen["mask"], seen["weight"] = native_choice(output, self.num_experts(block))

        stack.enter_context(after_forward(block.router, router_chose))

    def routing(self, block: Block, seen: dict[str, Tensor]) -> Routing:
        if "mask" not in seen:
            return super().routing(block, seen)
        # A token over capacity has an empty mask: what it asked for is the arg-max in the order of the native router.
        from moepress.runtime.switch import choose

        asked_T1 = choose(seen["logits"], block.router.dtype, seen["hidden"].dtype)[0][:, None]
        served_T1 = seen["mask"].any(dim=-1, keepdim=True)
        seen["index"] = torch.where(served_T1, seen["mask"].long().argmax(dim=-1, keepdim=True), asked_T1)
        seen["weight"] = seen["weight"] * served_T1
        return super().routing(block, seen)
