"""Families that keep one module per expert in a ModuleDict: `expert_0`, `expert_1`, …"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from moepress.models.adapter import Block
from moepress.models.layer import CompactSpec, ExpertBank
from moepress.models.linear_router import LinearRouterAdapter
from moepress.models.stacked import side_by_side, stacked_in_place
from moepress.runtime.factored import FactoredModules, factors_of


class ModuleDictAdapter(LinearRouterAdapter):
    """Two linear maps an expert, without gate. Reading stacks them, which is a copy unless they lie side by side in
    memory, as those that come from files do; writing copies back."""

    first: ClassVar[str]
    second: ClassVar[str]
    factored_form = FactoredModules

    def matches(self, block: Block) -> bool:
        experts = getattr(block, "experts", None)
        if not isinstance(experts, nn.ModuleDict):
            return False
        if factors_of(experts) is not None:
            return True
        if "expert_0" not in experts:
            return False
        children = dict(experts["expert_0"].named_children())
        return self.first in children and self.second in children

    def modules(self, block: Block) -> list[Block]:
        """The experts in order. (NLLB's dictionary also holds a dropout.)"""
        experts = self.experts(block)
        names = (f"expert_{e}" for e in range(len(experts)))  # type: ignore[arg-type]
        return [experts[name] for name in names if name in experts]  # type: ignore[index, operator]

    def stored(self, block: Block) -> tuple[int, torch.dtype]:
        if self.factors(block) is not None:
            return super().stored(block)
        modules = self.modules(block)
        return len(modules), getattr(modules[0], self.first).weight.dtype

    def widths(self, block: Block) -> tuple[int, int]:
        if self.factors(block) is not None:
            return super().widths(block)
        units, width = getattr(self.modules(block)[0], self.first).weight.shape  # without a copy of all experts
        return units, width

    def refusal(self, block: Block) -> str | None:
        known = {f"{map_}.{leaf}" for map_ in (self.first, self.second) for leaf in ("weight", "bias")}
        tensors = {name for expert in self.modules(block) for name, _ in expert.named_parameters()}
        if unknown := sorted(tensors - known):
            return f"its experts hold tensors that moepress does not know: {', '.join(unknown)}"
        return super().refusal(block)

    def native_bank(self, block: Block) -> ExpertBank:
        experts = self.modules(block)
        maps = {"up": [getattr(e, self.first) for e in experts], "down": [getattr(e, self.second) for e in experts]}

        def stacked(name: str, leaf: str) -> Tensor | None:
            tensors = [getattr(linear, leaf) for linear in maps[name]]
            return None if tensors[0] is None else stacked_in_place([t.data for t in tensors])

        up_EFD, down_EDF = stacked("up", "weight"), stacked("down", "weight")
        assert up_EFD is not None and down_EDF is not None
        return ExpertBank(
            up_EFD=up_EFD,
            down_EDF=down_EDF,
            up_bias_EF=stacked("up", "bias"),
            down_bias_ED=stacked("down", "bias"),
            activation=lambda _, up_TF: experts[0].act(up_TF),
        )

    def write_native(self, block: Block, bank: ExpertBank) -> None:
        self.write_experts(block, map(bank.expert, range(bank.num_experts)))

    def write_experts(self, block: Block, experts: Iterable[dict[str, Tensor]]) -> None:
        place = {
            "up_EFD": (self.first, "weight"),
            "up_bias_EF": (self.first, "bias"),
            "down_EDF": (self.second, "weight"),
            "down_bias_ED": (self.second, "bias"),
        }
        for module, expert in zip(self.modules(block), experts, strict=True):
            for name, tensor in expert.items():
                owner, leaf = place[name]
                getattr(getattr(module, owner), leaf).data.copy_(tensor)

    def drop_native(self, block: Block) -> None:
        experts, first = self.experts(block), self.modules(block)[0]
        for e in range(len(self.modules(block))):
            del experts[f"expert_{e}"]
        experts.between = nn.Sequential(first.act, first.dropout)

    def reshape_experts(self, block: Block, spec: CompactSpec) -> None:
        experts = self.experts(block)
        for e in range(spec.physical, self.stored(block)[0]):
            del experts[f"expert_{e}"]
        experts.num_experts = spec.physical
        maps = [[getattr(module, name) for module in self.modules(block)] for name in (self.first, self.second)]
        for linears in maps:  # the old weights are not written over: what is merged is made of them
            for leaf in ("weight", "bias"):
                olds = [getattr(linear, leaf) for linear in linears]
                if olds[0] is None or olds[0].is_meta:
                    continue
                news = side_by_side(len(olds), olds[0].shape, olds[0].dtype, olds[0].device)
                for linear, old, new in zip(linears, olds, news, strict=True):
                    setattr(linear, leaf, nn.Parameter(new, requires_grad=old.requires_grad))
