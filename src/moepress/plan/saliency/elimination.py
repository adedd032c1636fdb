"""Scores from trying: experts are taken away a few at a time, each time those whose absence changes the layer least.

Shape suffixes: N sampled tokens, K experts chosen per token, E experts, P numbers that stand for an output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.errors import MoepressError
from moepress.models.layer import ExpertBank, LayerBatch, Routing
from moepress.models.visit import LayerVisit
from moepress.plan.facts import LayerFacts
from moepress.plan.saliency.base import SALIENCIES, Saliency


@SALIENCIES.register("elimination")
@dataclass(frozen=True)
class Elimination(Saliency):
    """In what order experts can go, found by trying on a sample of the calibration tokens: the model's own router
    routes without each of them, and those go first without which the layer's output stays nearest to the whole one.
    The score is the growth of the squared error relative to the residual stream: it can be compared between layers."""

    tokens: int = 8192
    """Sampled, from all domains alike."""
    batches: int = 8
    """They are taken from about so many batches, which are spread over the text: what is alike stands together."""
    rounds: int = 8
    """Experts that must go are taken away in so many steps."""
    width: int = 128
    """Outputs are compared in a random projection to so many numbers."""
    relative: float = 0.5
    """How much a token's residual stream divides its error, see `LayerVisit.token_weight`."""

    needs_visit = True
    shared = True

    def score(self, facts: LayerFacts) -> Tensor:
        visit, keep = facts.visit, facts.keep
        if visit is None or keep is None:
            raise MoepressError(f"layer {facts.name!r}: elimination tries experts out and needs calibration inputs")
        said = Projected(visit.layer.bank, self.width)
        batches = visit.spread(self.batches)
        strength = visit.strength if visit.reference else 1.0
        tokens = -(-self.tokens // len(batches))
        here = [i for i in batches if i in visit.here]
        samples = {i: Sample.of(visit, i, said, self.relative, tokens, strength) for i in here}
        damage = by_expert if facts.router.selection_bias else by_choice
        gone: list[int] = []
        excess = facts.experts - keep
        step = -(-excess // self.rounds)
        score_E = torch.zeros(facts.experts, dtype=torch.float64)
        level = 0.0
        while True:
            each = visit.each(lambda i, gone=tuple(gone): damage(samples[i], list(gone)), batches)  # type: ignore[misc]
            damage_E = torch.stack(list(each)).sum(0)
            # Who goes later is missed more, also where taking others away has made an expert dispensable.
            left = [e for e in range(facts.experts) if e not in gone]
            score_E[left] = damage_E[left].clamp_min(0) + level
            if len(gone) >= excess:
                return score_E
            chosen = weakest(damage_E, min(step, excess - len(gone)), gone, facts.router.groups)
            level = float(score_E[chosen].max())
            gone += chosen


def weakest(damage_E: Tensor, count: int, gone: list[int], router_groups: int) -> list[int]:
    """The experts that are missed least, equally many in each router group."""
    size = len(damage_E) // router_groups
    chosen: list[int] = []
    for start in range(0, len(damage_E), size):
        left = [e for e in range(start, start + size) if e not in gone]
        chosen += sorted(left, key=lambda e: (float(damage_E[e]), e))[: -(-count // router_groups)]
    return chosen


@dataclass
class Sample:
    """Some tokens of a batch, with what every expert would say to each of them."""

    visit: LayerVisit
    batch: int
    row_N: Tensor
    """The sampled tokens of that batch."""
    weight_N: Tensor
    target_NP: Tensor
    said_ENP: Tensor

    @classmethod
    def of(cls, visit: LayerVisit, i: int, said: Projected, relative: float, tokens: int, strength: float) -> Sample:
        seen: LayerBatch = visit.observe(i)[0]
        real_N = torch.where(seen.keep_T)[0]
        row_N = real_N[torch.linspace(0, len(real_N) - 1, min(tokens, len(real_N))).long().to(real_N.device)]
        weight_N = visit.token_weight(i, relative).to(row_N.device)[row_N] * (len(real_N) / len(row_N))
        said_ENP = said.outputs(seen.routing.hidden_TD[row_N])
        narrow = visit.narrowed(i, row_N)
        where = (visit, i, row_N) if narrow is None else (narrow, 0, torch.arange(len(row_N), device=row_N.device))
        sample = cls(*where, weight_N, said_ENP[0], said_ENP)
        sample.target_NP = sample.combined(sample.routing([]))
        if i in visit.drift:
            sample.target_NP += said.project(visit.drift[i][row_N].float() / strength)
        return sample

    def routing(self, gone: list[int], each_T: Tensor | None = None) -> Routing:
        """Without the experts that are gone and, of each token, without one more."""
        if not gone and each_T is None:
            return self.visit.observe(self.batch)[0].routing
        return self.visit.routing_without(self.batch, gone, each_T)

    def choice(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Chosen experts and their weights, (N, K) each; 0 for what is no expert of this layer."""
        index_NK, weight_NK = routing.index_TK[self.row_N], routing.weight_TK[self.row_N].float()
        return index_NK.clamp(max=len(self.said_ENP) - 1), weight_NK * (index_NK < len(self.said_ENP))

    def combined(self, routing: Routing) -> Tensor:
        """What the chosen experts say together: (N, P)."""
        index_NK, weight_NK = self.choice(routing)
        token_N = torch.arange(len(index_NK), device=index_NK.device)
        total_NP = self.said_ENP.new_zeros(self.said_ENP.shape[1:])
        for index_N, weight_N in zip(index_NK.T, weight_NK.T, strict=True):
            total_NP += self.said_ENP[index_N, token_N] * weight_N[:, None]
        return total_NP

    def error(self, routing: Routing) -> Tensor:
        """(N,) the weighted squared error of each token's output."""
        return self.weight_N * (self.target_NP - self.combined(routing)).square().sum(-1)


def by_choice(sample: Sample, gone: list[int]) -> Tensor:
    """(E,) by how much the error grows when one more expert goes. As many routings as a token has choices: in each,
    every token does without one of its own."""
    now = sample.routing(gone)
    error_N, (index_NK, weight_NK) = sample.error(now), sample.choice(now)
    damage_E = torch.zeros(len(sample.said_ENP), dtype=torch.float64, device=error_N.device)
    for k in range(index_NK.shape[1]):
        each_T = now.index_TK[:, k].clamp(max=len(damage_E) - 1)
        growth_N = sample.error(sample.routing(gone, each_T)) - error_N
        damage_E.index_add_(0, index_NK[:, k], growth_N.double() * (weight_NK[:, k] != 0))
    return damage_E.cpu()


def by_expert(sample: Sample, gone: list[int]) -> Tensor:
    """The same with a routing for each expert, where a selection bias could overrule a forbidden choice."""
    now = sample.routing(gone)
    error_N, (index_NK, weight_NK) = sample.error(now), sample.choice(now)
    damage_E = torch.zeros(len(sample.said_ENP), dtype=torch.float64)
    for e in torch.unique(index_NK[weight_NK != 0]).tolist():
        without = sample.routing([*gone, e])
        damage_E[e] = float((sample.error(without) - error_N).double().sum())
    return damage_E


class Projected:
    """A layer's experts, whose outputs are shortened by a random projection that leaves distances about the same."""

    def __init__(self, bank: ExpertBank, width: int) -> None:
        full = bank.down_EDF.shape[1]
        self.bank, self.map_DP = bank, None
        if full > width:
            draw_DP = torch.randn(full, width, generator=torch.Generator().manual_seed(0)) / width**0.5
            self.map_DP = draw_DP.to(bank.down_EDF.device)

    def project(self, x_TD: Tensor) -> Tensor:
        return x_TD if self.map_DP is None else x_TD @ self.map_DP

    def outputs(self, x_ND: Tensor) -> Tensor:
        x_ND = x_ND.to(self.bank.up_EFD.dtype)
        width = self.bank.down_EDF.shape[1] if self.map_DP is None else self.map_DP.shape[1]
        said_ENP = torch.empty(self.bank.num_experts, len(x_ND), width, device=x_ND.device)
        for e, said_NP in enumerate(said_ENP):
            said_NP.copy_(self.project(self.bank.output(e, x_ND).float()))
        return said_ENP
