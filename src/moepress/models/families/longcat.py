"""LongCat-Flash: after the experts the router has rows that stand for no weights and return their input."""

from dataclasses import replace

from moepress.models.adapter import Block
from moepress.models.fused import FusedAdapter, Layout
from moepress.models.layer import CompactSpec, ExpertBank
from moepress.models.linear_router import keep_rows
from moepress.runtime.factored import FactoredWithIdentity


class LongcatAdapter(FusedAdapter):
    name = "longcat-flash"
    factored_form = FactoredWithIdentity

    def layout(self, experts: Block) -> Layout | None:
        return Layout() if hasattr(experts, "zero_expert_num") and hasattr(experts, "num_routed_experts") else None

    def fixed_rows(self, block: Block) -> int:
        return self.experts(block).zero_expert_num

    def native_bank(self, block: Block) -> ExpertBank:
        # gate_up_proj has rows for the identity experts too, which nothing reads.
        bank, experts = super().native_bank(block), self.experts(block).num_routed_experts
        assert bank.gate_EFD is not None
        return replace(bank, gate_EFD=bank.gate_EFD[:experts], up_EFD=bank.up_EFD[:experts])

    def reshape_experts(self, block: Block, spec: CompactSpec) -> None:
        experts = self.experts(block)
        keep_rows(experts, "gate_up_proj", spec.physical, tail=experts.zero_expert_num)
        keep_rows(experts, "down_proj", spec.physical, tail=0)
        experts.num_routed_experts = spec.physical
        experts.total_experts = spec.physical + experts.zero_expert_num
