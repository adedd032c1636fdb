"""Scores from trying: experts are taken away a few at a time, each time those whose absence changes the layer least.

Shape suffixes: N sampled tokens, K experts chosen per token, E experts, P numbers that stand for an output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.errors import MoepressError
from moepress.models.layer import ExpertBank, LayerBatch, Routing
from moepress.models.walk import LayerVisit
from moepress.plan.facts import LayerFacts
from moepress.plan.saliency.base import SALIENCIES, Saliency


@SALIENCIES.register("elimination")
@dataclass(frozen=True)
class Elimination(Saliency):
    """In what order experts can go, found by trying on a sample of the calibration tokens: the model's own router
    routes without each of them, and those go first without which the layer's output stays nearest to the whole one."""

    tokens: int = 8192
    """Sampled; as whole batches, from all domains alike."""
    rounds: int = 8
    """Experts that must go are taken away in so many steps."""
    relative: float = 0.5
    """Tokens count as 1 / ‖residual stream‖^(2·relative), where the stream is known."""

    needs_visit = True

    def score(self, facts: LayerFacts) -> Tensor:
        visit, keep = facts.visit, facts.keep
        if visit is None or keep is None:
            raise MoepressError(f"layer {facts.name!r}: elimination tries experts out and needs calibration inputs")
        samples = [Sample.of(visit, i, self.relative) for i in sampled_batches(visit, self.tokens)]
        gone: list[int] = []
        excess = facts.experts - keep
        step = -(-excess // self.rounds)
        step = -(-step // facts.router.groups) * facts.router.groups
        while len(gone) < excess:
            damage_E = sum((sample.damage(visit, gone) for sample in samples), torch.zeros(facts.experts))
            gone += weakest(damage_E, min(step, excess - len(gone)), gone, facts.router.groups)
        # What stays is ranked by what it would cost to lose it next, and above all that went.
        damage_E = sum((sample.damage(visit, gone) for sample in samples), torch.zeros(facts.experts))
        score_E = damage_E.double() - damage_E.min() + len(gone) + 1
        score_E[gone] = torch.arange(len(gone), dtype=torch.float64)
        return score_E


def weakest(damage_E: Tensor, count: int, gone: list[int], router_groups: int) -> list[int]:
    """The experts that are missed least, equally many in each router group."""
    size = len(damage_E) // router_groups
    chosen: list[int] = []
    for start in range(0, len(damage_E), size):
        left = [e for e in range(start, start + size) if e not in gone]
        chosen += sorted(left, key=lambda e: (float(damage_E[e]), e))[: -(-count // router_groups)]
    return chosen


def sampled_batches(visit: LayerVisit, tokens: int) -> list[int]:
    """Batches with about so many tokens, taken from one domain after the other."""
    by_domain: dict[str, list[int]] = {}
    for i in range(len(visit)):
        by_domain.setdefault(visit.domain(i), []).append(i)
    chosen: list[int] = []
    seen = 0
    for turn in range(max(len(members) for members in by_domain.values())):
        for members in by_domain.values():
            if turn < len(members):
                chosen.append(members[turn])
                seen += visit.tokens(members[turn])
        if seen >= tokens:
            break
    return chosen


@dataclass
class Sample:
    """One batch with what every expert would say to each of its tokens."""

    batch: int
    weight_N: Tensor
    """How much each token counts; 0 on padding."""
    target_NP: Tensor
    said_ENP: Tensor

    @classmethod
    def of(cls, visit: LayerVisit, i: int, relative: float) -> Sample:
        seen: LayerBatch = visit.observe(i)[0]
        bank = visit.layer.bank
        said_ENP = outputs(bank, seen.routing)
        weight_N = seen.keep_T.float()
        target_NP = combined(seen.routing, said_ENP)
        if i in visit.drift:
            target_NP = target_NP + visit.drift[i].float()
            weight_N = weight_N * visit.stream_norm[i].float().clamp_min(1e-6) ** (-2 * relative)
        return cls(i, weight_N, target_NP, said_ENP)

    def damage(self, visit: LayerVisit, gone: list[int]) -> Tensor:
        """(E,) by how much the weighted squared error grows when one more expert goes."""
        experts = len(self.said_ENP)
        now = visit.routing_without(self.batch, gone) if gone else visit.observe(self.batch)[0].routing
        error_N = (self.target_NP - combined(now, self.said_ENP)).square().sum(-1)
        damage_E = torch.zeros(experts)
        for e in range(experts):
            if e in gone:
                continue
            hit_N = ((now.index_TK == e) & (now.weight_TK != 0)).any(dim=1)
            if not bool(hit_N.any()):
                continue
            without = visit.routing_without(self.batch, [*gone, e])
            said_nP = combined(without, self.said_ENP, hit_N)
            after_n = (self.target_NP[hit_N] - said_nP).square().sum(-1)
            damage_E[e] = float((self.weight_N[hit_N] * (after_n - error_N[hit_N])).sum())
        return damage_E


def outputs(bank: ExpertBank, routing: Routing) -> Tensor:
    return torch.stack([bank.output(e, routing.hidden_TD).float() for e in range(bank.num_experts)])


def combined(routing: Routing, said_ENP: Tensor, rows_N: Tensor | None = None) -> Tensor:
    """What the chosen experts say together."""
    index_NK, weight_NK = routing.index_TK, routing.weight_TK.float()
    token_N = torch.arange(len(index_NK), device=index_NK.device)
    if rows_N is not None:
        index_NK, weight_NK, token_N = index_NK[rows_N], weight_NK[rows_N], token_N[rows_N]
    total_NP = said_ENP.new_zeros(len(index_NK), said_ENP.shape[-1])
    for index_N, weight_N in zip(index_NK.T, weight_NK.T, strict=True):
        served_N = index_N < len(said_ENP)
        total_NP += said_ENP[index_N.clamp(max=len(said_ENP) - 1), token_N] * (weight_N * served_N)[:, None]
    return total_NP
