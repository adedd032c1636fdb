"""Experts modules that compute with factored matrices. Each is its native class with another forward.

The families' classes are many and their contract is one, so the subclass is made on demand; it copies and pickles by
its native class.

Shape suffixes: E physical experts, D width, F hidden units, T tokens, K chosen per token, n = calls of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from moepress.models.layer import Activation
from moepress.runtime import become
from moepress.runtime.activation import activate
from moepress.runtime.factors import ExpertFactors
from moepress.runtime.serve import Groups, serve


def factors_of(module: Any) -> ExpertFactors | None:
    factors = getattr(module, "factors", None)
    return factors if isinstance(factors, ExpertFactors) else None


@dataclass(frozen=True)
class FactoredBank:
    factors: ExpertFactors
    activate: Activation

    @property
    def experts(self) -> int:
        return self.factors.experts

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.factors.sizes

    def one(self, e: int, x_nD: Tensor) -> Tensor:
        return self.factors.one(e, x_nD, self.activate)

    def together(self, x_nD: Tensor, groups: Groups) -> Tensor:
        return self.factors.together(x_nD, groups, self.activate)


class Factored:
    """Put before a native class."""

    factors: ExpertFactors

    def bank(self) -> FactoredBank:
        return FactoredBank(self.factors, self.activate)

    def activate(self, gate_nF: Tensor | None, up_nF: Tensor) -> Tensor:
        return activate(self, gate_nF, up_nF)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        mixin, native = type(self).__bases__
        return _blank, (mixin, native), self.__getstate__()


class FactoredRouted(Factored):
    """Experts called with hidden states, the physical experts of each token, and their weights."""

    def forward(self, hidden: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        return serve(self.bank(), hidden.reshape(-1, hidden.shape[-1]), index_TK, weight_TK).reshape(hidden.shape)


class FactoredWithIdentity(FactoredRouted):
    """Indices after the experts stand for no weights and give back their input."""

    def forward(self, hidden: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        through_T1 = (weight_TK * (index_TK >= self.factors.experts)).sum(dim=-1, keepdim=True)
        return super().forward(hidden, index_TK, weight_TK) + (hidden * through_T1).to(hidden.dtype)


class FactoredEveryToken(Factored):
    """Llama 4: the same number of tokens for every expert, in the order of the experts."""

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        experts = self.factors.experts
        return self.factors(hidden, [hidden.shape[0] // experts] * experts, self.activate)


class FactoredGlu(FactoredRouted):
    """DBRX keeps the activation one module deeper."""

    def activate(self, gate_nF: Tensor | None, up_nF: Tensor) -> Tensor:
        return self.mlp.activation_fn(gate_nF) * up_nF  # type: ignore[attr-defined]


class FactoredChoosing(FactoredRouted):
    """Aria: the experts choose for themselves."""

    def activate(self, gate_nF: Tensor | None, up_nF: Tensor) -> Tensor:
        assert gate_nF is not None
        return nn.functional.silu(gate_nF) * up_nF

    def forward(self, hidden: Tensor, router_logits: Tensor) -> Tensor:  # type: ignore[override]
        index_TK, weight_TK = self.route_tokens_to_experts(router_logits)  # type: ignore[attr-defined]
        return super().forward(hidden, index_TK, weight_TK)


class FactoredJetMoe(Factored):
    """JetMoE: the block holds the experts, and its router sorts the tokens."""

    def activate(self, gate_nF: Tensor | None, up_nF: Tensor) -> Tensor:
        return self.activation(gate_nF) * up_nF  # type: ignore[attr-defined]

    def forward(self, layer_input: Tensor) -> Tensor:  # type: ignore[override]
        x_TD = layer_input.reshape(-1, layer_input.shape[-1])
        _, token_n, gate_n, counts, _ = self.router(x_TD)  # type: ignore[attr-defined]
        y_nD = self.factors(x_TD[token_n], list(counts), self.activate) * gate_n[:, None]
        output_TD = torch.zeros_like(x_TD).index_add(0, token_n, y_nD.to(x_TD.dtype))
        return output_TD.view(layer_input.shape) + self.bias  # type: ignore[attr-defined]


class FactoredModules(Factored):
    """Families with a module for each expert (Switch, NLLB): whoever routes asks for one expert at a time."""

    def activate(self, gate_nF: Tensor | None, up_nF: Tensor) -> Tensor:
        return self.between(up_nF)  # type: ignore[attr-defined]


@cache
def factored_class(mixin: type, native: type) -> type:
    return type(f"{mixin.__name__}{native.__name__}", (mixin, native), {"__module__": __name__})


def _blank(mixin: type, native: type) -> Any:
    cls = factored_class(mixin, native)
    return object.__new__(cls)


def become_factored(module: nn.Module, mixin: type, factors: ExpertFactors) -> None:
    """Give an experts module factored matrices, and a forward that computes with them."""
    if not isinstance(module, Factored):
        become(module, factored_class(mixin, type(module)))  # type: ignore[arg-type]
    module.factors = factors
