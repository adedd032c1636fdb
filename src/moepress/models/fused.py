"""Families whose experts are fused 3-D parameters: nearly all of them, without code of their own.

The layout is read from what transformers' `use_experts_implementation` leaves on the experts module. A family that
stores experts fused but does not carry these marks has a subclass under `families/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from moepress.models.adapter import Block
from moepress.models.layer import CompactSpec, ExpertBank
from moepress.models.linear_router import LinearRouterAdapter, keep_rows
from moepress.runtime.activation import activate
from moepress.runtime.factored import factors_of


@dataclass(frozen=True)
class Layout:
    """How an experts module stores its matrices."""

    gate: bool = True
    """gate_up_proj holds both; otherwise there is only up_proj."""
    bias: bool = False
    transposed: bool = False
    """(E, in, out) instead of (E, out, in)."""
    concatenated: bool = True
    """[gate; up] instead of gate and up unit by unit."""

    @property
    def first(self) -> str:
        return "gate_up_proj" if self.gate else "up_proj"

    def names(self) -> set[str]:
        names = {self.first, "down_proj"}
        return names | {f"{name}_bias" for name in names} if self.bias else names


class FusedAdapter(LinearRouterAdapter):
    name = "fused"

    def layout(self, experts: Block) -> Layout | None:
        if not hasattr(experts, "is_transposed"):
            return None
        return Layout(experts.has_gate, experts.has_bias, experts.is_transposed, experts.is_concatenated)

    def matches(self, block: Block) -> bool:
        experts = getattr(block, "experts", None)
        if not isinstance(experts, nn.Module) or (layout := self.layout(experts)) is None:
            return False
        if factors_of(experts) is not None:
            return True
        own = dict(experts.named_parameters(recurse=False))
        return layout.names() <= set(own) and own[layout.first].dim() == 3

    def refusal(self, block: Block) -> str | None:
        known = self._layout(block).names()
        tensors = (name for name, _ in self.experts(block).named_parameters() if not name.startswith("factors."))
        if unknown := sorted(name for name in tensors if name not in known):
            return f"its experts hold tensors that moepress does not know: {', '.join(unknown)}"
        return super().refusal(block)

    def _layout(self, block: Block) -> Layout:
        layout = self.layout(self.experts(block))
        assert layout is not None  # asked only about blocks that match
        return layout

    # ---- experts ----------------------------------------------------------------------------------------------

    def native_bank(self, block: Block) -> ExpertBank:
        experts, layout = self.experts(block), self._layout(block)

        def matrix(name: str) -> Tensor:
            tensor = getattr(experts, name).data
            return tensor.transpose(1, 2) if layout.transposed else tensor

        def bias(name: str) -> Tensor:
            return getattr(experts, f"{name}_bias").data

        bank = ExpertBank(
            up_EFD=matrix(layout.first), down_EDF=matrix("down_proj"), activation=self.activation(experts)
        )
        if layout.bias:
            bank = replace(bank, up_bias_EF=bias(layout.first), down_bias_ED=bias("down_proj"))
        if not layout.gate:
            return bank
        gate_EFD, up_EFD = halves(bank.up_EFD, layout.concatenated)
        if bank.up_bias_EF is not None:
            gate_bias_EF, up_bias_EF = halves(bank.up_bias_EF, layout.concatenated)
            bank = replace(bank, gate_bias_EF=gate_bias_EF, up_bias_EF=up_bias_EF)
        return replace(bank, gate_EFD=gate_EFD, up_EFD=up_EFD)

    def activation(self, experts: Block) -> Callable[[Tensor | None, Tensor], Tensor]:
        return partial(activate, experts)

    def reshape_experts(self, block: Block, spec: CompactSpec) -> None:
        experts = self.experts(block)
        for name, _ in list(experts.named_parameters(recurse=False)):
            keep_rows(experts, name, spec.physical, tail=0)
        experts.num_experts = spec.physical


def halves(tensor: Tensor, concatenated: bool) -> tuple[Tensor, Tensor]:
    """Gate and up of a fused (E, 2F, …) tensor, as views."""
    if concatenated:
        gate, up = tensor.chunk(2, dim=1)
        return gate, up
    return tensor[:, ::2], tensor[:, 1::2]
