"""A compact Switch layer owns its routing: transformers' own has changed its meaning between versions.

Up to 5.17 the native router returned probabilities as logits and capacity did nothing; since 5.18 capacity is counted
per sequence again and raw logits are returned. Here the result is the same under all of them, with capacity (per
original expert and sequence) as the layer's own number.

Shape suffixes: B sequences, S tokens of one, E original experts, D width, T = B * S.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from transformers import SwitchTransformersConfig
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersSparseMLP,
    SwitchTransformersTop1Router,
)

from moepress.runtime.factored import Factored
from moepress.runtime.modules import ModuleBank
from moepress.runtime.redirect import redirected
from moepress.runtime.serve import Experts, serve


@dataclass(frozen=True)
class NativeRules:
    """What the installed transformers does in its own Switch layers."""

    capacity: bool
    """Tokens over capacity are dropped, counted per sequence."""
    records_logits: bool
    """`output_router_logits` shows (B, S, E) logits, and the auxiliary losses read them so."""


@cache
def native_rules() -> NativeRules:
    """Found by asking: three tokens for one expert that has room for one."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        config = SwitchTransformersConfig(d_model=2, num_experts=2, expert_capacity=1)
        router = SwitchTransformersTop1Router(config).eval()
        router.classifier.weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
        outputs = router(torch.ones(1, 3, 2))
    mask, _ = native_choice(outputs, 2)
    return NativeRules(capacity=int(mask.sum()) == 1, records_logits=tuple(outputs[2].shape) == (1, 3, 2))


def native_choice(outputs: tuple[Tensor, ...], experts: int) -> tuple[Tensor, Tensor]:
    """The native router's dispatch mask (T, E) and gate (T, 1), in whichever order this version returns them."""
    mask = next(t for t in outputs if not t.is_floating_point())
    gate = next(t for t in outputs if t.is_floating_point() and t.shape[-1] == 1)
    return mask.reshape(-1, experts), gate.reshape(-1, 1)


def choose(logits: Tensor, router_dtype: torch.dtype, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Index and probability of the best expert. The probabilities are rounded to the model's dtype before they are
    compared, as the native router does: in bf16 the other order chooses other experts."""
    probabilities = nn.functional.softmax(logits, dim=-1, dtype=router_dtype).to(dtype)
    gate, index = probabilities.max(dim=-1)
    return index, gate


class CompactSwitchRouter(SwitchTransformersTop1Router):
    """Returns original experts (B, S), gates (B, S), and the raw logits where recorders look for them."""

    expert_capacity: int | None  # type: ignore[assignment]

    def forward(self, hidden_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_BSD = hidden_BSD.to(self.dtype)
        if self.training and self.jitter_noise > 0:
            # Not in place: where no cast is needed that would disturb the experts' input as well.
            x_BSD = x_BSD * torch.empty_like(x_BSD).uniform_(1.0 - self.jitter_noise, 1.0 + self.jitter_noise)
        self.classifier.to(self.dtype)
        logits_BSE = self.classifier(x_BSD)
        index_BS, gate_BS = choose(logits_BSE, self.dtype, hidden_BSD.dtype)
        if self.expert_capacity is not None:
            turn_BSE = nn.functional.one_hot(index_BS, logits_BSE.shape[-1]).cumsum(dim=-2)
            turn_BS = turn_BSE.gather(-1, index_BS[..., None])[..., 0]
            gate_BS = gate_BS * (turn_BS <= self.expert_capacity)
        if native_rules().records_logits:
            return index_BS, gate_BS, logits_BSE
        # The losses of these versions cannot read logits (nor their own records). Flattened, they fail loudly
        # instead of mistaking the two sequences of a batch for something else.
        return index_BS, gate_BS, logits_BSE.flatten(0, -2)


class CompactSwitchMLP(SwitchTransformersSparseMLP):
    """Each physical expert runs once, on the tokens of all original experts that it stands for."""

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        index_BS, gate_BS, _ = self.router(hidden_BSD)
        expert_BS = redirected(self.router, index_BS) if self._redirects() else index_BS
        bank = self._bank()
        # The largest of E probabilities is never 0: tokens without a gate are over capacity.
        expert_T1 = expert_BS.masked_fill(gate_BS <= 0, bank.experts).reshape(-1, 1)
        x_TD = hidden_BSD.reshape(-1, hidden_BSD.shape[-1])
        return serve(bank, x_TD, expert_T1, gate_BS.reshape(-1, 1)).reshape(hidden_BSD.shape)

    def _bank(self) -> Experts:
        if isinstance(self.experts, Factored):
            return self.experts.bank()
        return ModuleBank(list(self.experts.values()), "wi", "wo")

    def _redirects(self) -> bool:
        return isinstance(getattr(self.router, "expert_map", None), Tensor)
