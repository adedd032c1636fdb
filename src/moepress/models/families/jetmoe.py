"""JetMoE: the mixture of MLP experts. Its mixture of attention heads is another thing and is left whole (`find.py`)."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from moepress.models.adapter import Block
from moepress.models.fused import halves
from moepress.models.layer import CompactSpec, ExpertBank
from moepress.models.linear_router import LinearRouterAdapter, keep_rows
from moepress.models.taps import after_forward, method_results
from moepress.runtime import become
from moepress.runtime.factored import FactoredJetMoe, factors_of
from moepress.runtime.redirect import add_map


class JetMoeAdapter(LinearRouterAdapter):
    name = "jetmoe"
    experts_take_routing = False
    factored_form = FactoredJetMoe
    vanilla = False
    """The attention experts are counted by the same number of the config."""

    def matches(self, block: Block) -> bool:
        parts = ("input_linear", "output_linear") if factors_of(block) is None else ()
        return all(isinstance(getattr(block, name, None), nn.Module) for name in (*parts, "router")) and hasattr(
            block, "activation"
        )

    def experts(self, block: Block) -> Block:
        return block

    def drop_native(self, block: Block) -> None:
        del block.input_linear, block.output_linear

    def native_bank(self, block: Block) -> ExpertBank:
        gate_EFD, up_EFD = halves(block.input_linear.weight.data, concatenated=True)
        return ExpertBank(
            gate_EFD=gate_EFD,
            up_EFD=up_EFD,
            down_EDF=block.output_linear.weight.data,
            activation=lambda gate_TF, up_TF: block.activation(gate_TF) * up_TF,
        )

    def reshape_experts(self, block: Block, spec: CompactSpec) -> None:
        for matrices in (block.input_linear, block.output_linear):
            keep_rows(matrices, "weight", spec.physical, tail=0)
            matrices.num_experts = spec.physical

    def redirect(self, block: Block, spec: CompactSpec) -> None:
        from moepress.runtime.jetmoe import CompactJetMoeGating

        become(block.router, CompactJetMoeGating)
        add_map(block.router, spec.experts, spec.physical)

    def watch(self, block: Block, seen: dict[str, Tensor], stack: ExitStack) -> None:
        def chosen(result: Any, hidden: Tensor) -> None:
            seen["index"], seen["weight"], _ = result

        def sorted_by_expert(args: tuple, output: Any) -> None:
            seen["hidden"] = args[0]
            if "index" not in seen:
                order, _, gates, counts, _ = output
                experts = torch.arange(len(counts), device=order.device)
                index = torch.empty_like(order)
                index[order] = experts.repeat_interleave(torch.tensor(counts, device=order.device))
                weight = torch.empty_like(gates)
                weight[order] = gates
                seen["index"], seen["weight"] = (t.view(-1, block.router.top_k) for t in (index, weight))

        if hasattr(block.router, "choose"):
            stack.enter_context(method_results(block.router, "choose", chosen))
        stack.enter_context(after_forward(block.router, sorted_by_expert))
