"""Samples of the tokens that some experts of a layer serve: what correlations of hidden units are made from. They
live as long as one layer is worked on.

Shape suffixes: N sampled tokens, n tokens of a batch, D input width, F hidden units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moepress.models.layer import Activation, preactivations
from moepress.models.visit import LayerVisit
from moepress.team import Team

LEAST = 256
"""Experts that serve fewer tokens than this are shown others of the layer beside them: fewer make no statistics."""


@dataclass(frozen=True)
class ExpertInputs:
    """Tokens in random order, as the experts get them."""

    x_ND: Tensor
    activation: Activation

    def first(self, tokens: int) -> ExpertInputs:
        return replace(self, x_ND=self.x_ND[:tokens])

    def preactivations(self, expert: dict[str, Tensor]) -> dict[str, Tensor]:
        """(N, F) each: `up` and, where there is one, `gate`."""
        gate_NF, up_NF = preactivations(expert, self.x_ND.to(expert["up_EFD"].dtype))
        return {"up": up_NF} if gate_NF is None else {"gate": gate_NF, "up": up_NF}

    def hidden(self, expert: dict[str, Tensor]) -> Tensor:
        """(N, F), at least in float32."""
        hidden_NF = self.activation(*preactivations(expert, self.x_ND.to(expert["up_EFD"].dtype)))
        return hidden_NF.to(torch.promote_types(hidden_NF.dtype, torch.float32))


class _Reservoir:
    """The tokens with the lowest keys of all that passed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.x_ND: Tensor | None = None
        self.key_N = torch.zeros(0)

    def add(self, x_nD: Tensor, key_n: Tensor) -> None:
        x_ND = x_nD if self.x_ND is None else torch.cat([self.x_ND, x_nD])
        self.key_N, order_N = torch.cat([self.key_N, key_n]).sort(stable=True)
        self.key_N = self.key_N[: self.size]
        self.x_ND = x_ND[order_N[: self.size].to(x_ND.device)]

    def gather(self, team: Team, width: int, like: Tensor) -> None:
        """The lowest of all processes together."""
        if team.size == 1:
            return
        x_ND = like.new_zeros(0, width) if self.x_ND is None else self.x_ND
        parts = team.gather((x_ND.cpu(), self.key_N))
        self.x_ND, self.key_N = None, torch.zeros(0)
        for part_ND, key_N in parts:
            self.add(part_ND.to(like.device), key_N)


def sample_inputs(visit: LayerVisit, groups: Sequence[Sequence[int]], tokens: int, seed: int = 0) -> list[ExpertInputs]:
    """For each group of experts at most `tokens` random inputs of its members, all domains alike.

    Holds groups x tokens x D numbers at a time.
    """
    generator = torch.Generator().manual_seed(seed * 100_003 + visit.layer.index)
    kept, spare = [_Reservoir(tokens) for _ in groups], _Reservoir(LEAST)
    for i in visit.numbers:
        draw_T = torch.empty(visit.tokens(i), dtype=torch.float64).exponential_(generator=generator)
        if i not in visit.here:
            continue
        batch = visit.observe(i)[0]
        routing = batch.kept()
        # The lowest of exponential numbers with these rates: a draw without replacement, weighted.
        key_T = draw_T / visit.token_weight(i, 0.0).cpu()[batch.keep_T.cpu()]
        spare.add(routing.hidden_TD, key_T)
        for reservoir, group in zip(kept, groups, strict=True):
            for e in group:
                token_n, x_nD, _ = routing.calls(e)
                reservoir.add(x_nD, key_T[token_n.cpu()])
    up_EFD, activation = visit.layer.bank.up_EFD, visit.layer.bank.activation
    for reservoir in (spare, *kept):
        reservoir.gather(visit.team, up_EFD.shape[2], up_EFD)
    return [ExpertInputs(_filled(reservoir, spare), activation) for reservoir in kept]


def _filled(own: _Reservoir, spare: _Reservoir) -> Tensor:
    assert own.x_ND is not None and spare.x_ND is not None  # every layer is visited by a batch at least
    wanted = min(LEAST, own.size) - len(own.x_ND)
    return torch.cat([own.x_ND, spare.x_ND[:wanted]]) if wanted > 0 else own.x_ND
