"""Aria up to transformers 5.17: grouped matrices, and experts that choose for themselves. Later it is fused."""

from contextlib import ExitStack

from torch import Tensor, nn

from moepress.models.adapter import Block
from moepress.models.fused import halves
from moepress.models.layer import CompactSpec, ExpertBank
from moepress.models.linear_router import LinearRouterAdapter, keep_rows
from moepress.models.taps import before_forward
from moepress.runtime import become
from moepress.runtime.factored import FactoredChoosing, factors_of
from moepress.runtime.redirect import add_map


class AriaAdapter(LinearRouterAdapter):
    name = "aria"
    experts_take_routing = False
    factored_form = FactoredChoosing

    def matches(self, block: Block) -> bool:
        experts = getattr(block, "experts", None)
        stored = all(hasattr(experts, name) for name in ("fc1", "fc2")) or factors_of(experts) is not None
        return isinstance(experts, nn.Module) and stored and hasattr(experts, "route_tokens_to_experts")

    def drop_native(self, block: Block) -> None:
        del block.experts.fc1, block.experts.fc2

    def native_bank(self, block: Block) -> ExpertBank:
        experts = block.experts
        gate_EFD, up_EFD = halves(experts.fc1.weight.data.transpose(1, 2), concatenated=True)
        return ExpertBank(
            gate_EFD=gate_EFD,
            up_EFD=up_EFD,
            down_EDF=experts.fc2.weight.data.transpose(1, 2),
            activation=_gated,
        )

    def reshape_experts(self, block: Block, spec: CompactSpec) -> None:
        for name in ("fc1", "fc2"):
            matrices = getattr(block.experts, name)
            keep_rows(matrices, "weight", spec.physical, tail=0)
            matrices.groups = spec.physical

    def redirect(self, block: Block, spec: CompactSpec) -> None:
        from moepress.runtime.aria import CompactAriaExperts

        become(block.experts, CompactAriaExperts)
        add_map(block.experts, spec.experts, spec.physical)

    def watch(self, block: Block, seen: dict[str, Tensor], stack: ExitStack) -> None:
        from transformers.models.aria.modeling_aria import AriaExperts

        def experts_called(args: tuple, kwargs: dict) -> None:
            seen["hidden"], logits = (*args, *kwargs.values())
            # The native method on the logits that it is about to get: original experts, also in a compact layer.
            seen["index"], seen["weight"] = AriaExperts.route_tokens_to_experts(block.experts, logits)

        stack.enter_context(before_forward(block.experts, experts_called))


def _gated(gate_TF: Tensor | None, up_TF: Tensor) -> Tensor:
    assert gate_TF is not None
    return nn.functional.silu(gate_TF) * up_TF
