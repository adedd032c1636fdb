from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.errors import MoepressError
from moepress.models.visit import LayerVisit
from moepress.plan.facts import LayerFacts
from moepress.plan.saliency.base import SALIENCIES, Saliency
from moepress.plan.survivors import Survivors


@SALIENCIES.register("progressive")
@dataclass(frozen=True)
class Progressive(Saliency):
    """How long each expert stays while the text goes by: the router's own choice among those that are left is averaged
    from batch to batch, and now and then those go that it hardly uses; the rest go at the end, the least used first."""

    paper = "Task-specific expert pruning, https://arxiv.org/abs/2206.00277"

    prunings: int = 5
    """How often experts are taken away, spread over the batches."""
    threshold: float = 0.1
    """Those go that have less than this part of an equal share."""
    smoothing: float = 0.6
    """What the average so far counts against the usage of a new batch."""
    passes: int = 1
    """How often the text goes by."""
    needs_visit = True
    shared = True

    def __post_init__(self) -> None:
        if min(self.prunings, self.passes) < 1 or not 0 <= self.smoothing < 1:
            raise MoepressError("progressive: prunings and passes must be at least 1, smoothing from 0 to below 1")

    def score(self, facts: LayerFacts) -> Tensor:
        visit, keep = facts.visit, facts.keep
        if visit is None or keep is None:
            raise MoepressError(f"layer {facts.name!r}: progressive pruning routes again and needs calibration inputs")
        survivors = Survivors(facts.experts, keep, facts.router.groups, self.smoothing)
        order = by_turns(visit) * self.passes
        pruned = 0
        for step, i in enumerate(order, 1):
            survivors.see(next(visit.each(lambda i: usage(visit, i, survivors.gone), [i])))
            if step * self.prunings // len(order) > pruned:
                pruned = step * self.prunings // len(order)
                survivors.prune(self.threshold)
        survivors.force()
        return survivors.scores()


def usage(visit: LayerVisit, i: int, gone: list[int]) -> Tensor:
    """(E,) how often each expert is chosen for the real tokens of a batch, when some cannot be."""
    batch = visit.observe(i)[0]
    routing = visit.routing_without(i, gone) if gone else batch.routing
    index_TK, weight_TK = routing.index_TK[batch.keep_T], routing.weight_TK[batch.keep_T]
    experts = visit.layer.num_experts
    chosen = index_TK[(index_TK < experts) & (weight_TK != 0)]
    return torch.bincount(chosen.flatten(), minlength=experts)


def by_turns(visit: LayerVisit) -> list[int]:
    """The batches, one domain after the other."""
    by_domain: dict[str, list[int]] = {}
    for i in visit.numbers:
        by_domain.setdefault(visit.domain(i), []).append(i)
    longest = max(len(members) for members in by_domain.values())
    return [members[turn] for turn in range(longest) for members in by_domain.values() if turn < len(members)]
