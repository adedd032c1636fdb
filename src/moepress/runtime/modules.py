"""The experts of families that have a module for each (Switch, NLLB): two linear maps with an activation in between.

Shape suffixes: E physical experts, D width, F hidden units, n rows in the order of their experts, I and O widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moepress.models.stacked import stacked_in_place
from moepress.runtime.grouped import grouped_product
from moepress.runtime.linear import linear
from moepress.runtime.serve import Groups


@dataclass(frozen=True)
class ModuleBank:
    modules: list[Any]
    first: str
    second: str
    """Names of the two maps."""

    @property
    def experts(self) -> int:
        return len(self.modules)

    @property
    def sizes(self) -> tuple[int, ...]:
        maps = [getattr(expert, name) for expert in self.modules for name in (self.first, self.second)]
        return tuple(maps[0].weight.shape) if all(plain(module) for module in (*self.modules, *maps)) else ()

    def one(self, e: int, x_nD: Tensor) -> Tensor:
        expert = self.modules[e]
        up, down = getattr(expert, self.first), getattr(expert, self.second)
        if expert.training or not all(plain(module) for module in (expert, up, down)):
            return expert(x_nD)
        h_nF = expert.act(linear(x_nD, up.weight, up.bias))
        return linear(h_nF.to(down.weight.dtype), down.weight, down.bias)

    def together(self, x_nD: Tensor, groups: Groups) -> Tensor:
        expert = self.modules[0]
        h_nF = expert.dropout(expert.act(self._map(self.first, x_nD, groups)))
        return self._map(self.second, h_nF, groups)

    def _map(self, name: str, x_nI: Tensor, groups: Groups) -> Tensor:
        maps = [getattr(expert, name) for expert in self.modules]
        w_EOI = together_of([each.weight for each in maps])
        y_nO = grouped_product(x_nI, w_EOI.transpose(1, 2), groups.ends_E)
        if maps[0].bias is None:
            return y_nO
        return groups.quiet(y_nO + together_of([each.bias for each in maps])[groups.expert_n])


def plain(module: Any) -> bool:
    """Whether nothing but its weights decides what it computes: no hook, wrapper or adapter."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    own = any(hooks) or "forward" in module.__dict__
    return not own and (type(module) is nn.Linear or type(module).__name__.endswith("DenseActDense"))


def together_of(tensors: list[Tensor]) -> Tensor:
    """As one tensor with the experts as first axis. A view where they lie side by side, but for gradients, which have
    to find each of them, and torch.compile, which does not know where tensors lie."""
    copied = torch.is_grad_enabled() or torch.compiler.is_compiling()
    return torch.stack(tensors) if copied else stacked_in_place(tensors)
