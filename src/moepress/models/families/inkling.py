"""Inkling: the router also scores the shared experts, in rows after those of the routed ones."""

from moepress.models.adapter import Block
from moepress.models.fused import FusedAdapter


class InklingAdapter(FusedAdapter):
    name = "inkling"

    def matches(self, block: Block) -> bool:
        return super().matches(block) and hasattr(getattr(block, "gate", None), "n_total_experts")

    def fixed_rows(self, block: Block) -> int:
        return self.router(block).n_shared_experts

    def shown_fixed_rows(self, block: Block) -> int:
        return 0  # the selection bias covers the routed experts only
