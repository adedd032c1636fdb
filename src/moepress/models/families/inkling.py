"""Inkling: the router also scores the shared experts, in rows after those of the routed ones."""

from torch import nn

from moepress.models.fused import FusedAdapter


class InklingAdapter(FusedAdapter):
    name = "inkling"

    def matches(self, block: nn.Module) -> bool:
        return super().matches(block) and hasattr(getattr(block, "gate", None), "n_total_experts")

    def fixed_rows(self, block: nn.Module) -> int:
        return self.router(block).n_shared_experts

    def shown_fixed_rows(self, block: nn.Module) -> int:
        return 0  # the selection bias covers the routed experts only
