"""Put a plan together from its four decisions: who matters, how many stay, who is alike, who joins whom."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from moepress.errors import MoepressError
from moepress.plan.budget import Budget, Limits
from moepress.plan.facts import LayerFacts
from moepress.plan.grouping import Grouping, strongest
from moepress.plan.guard import Guard
from moepress.plan.guard.nobody import Nobody
from moepress.plan.plan import Group, LayerPlan, Plan, RouterAction
from moepress.plan.saliency import Saliency
from moepress.plan.similarity import Similarity


@dataclass(frozen=True)
class Planner:
    saliency: Saliency
    similarity: Similarity
    budget: Budget
    grouping: Grouping
    router: RouterAction
    member_weights: Callable[[list[float]], list[float]]
    """Usage of a group's members, or their scores -> what each counts in the merge."""
    weigh_by: Literal["usage", "score"] = "usage"
    multiple_of: int = 1
    guard: Guard = field(default_factory=Nobody)
    rivals: tuple[Saliency, ...] = ()
    """Other saliencies, each of which is asked for a plan as well."""
    found: dict[str, torch.Tensor] = field(default_factory=dict, compare=False)
    """By layer, the similarities (E, E) that experts were grouped by."""

    @property
    def saliencies(self) -> tuple[Saliency, ...]:
        return (self.saliency, *self.rivals)

    @property
    def needs(self) -> tuple[str, ...]:
        """Statistics that must be gathered; usage always, since the weights of a merge come from it."""
        scored = (name for saliency in self.saliencies for name in saliency.needs)
        named = ("usage", *scored, *self.similarity.needs, *self.grouping.needs, *self.guard.needs)
        return tuple(dict.fromkeys(named))

    def limits(self, facts: LayerFacts) -> Limits:
        """A router that chooses among k rows needs at least top-k of them, equally many in each router group."""
        wanted = self.grouping.least(facts.experts)
        if self.router == "redirect":
            return Limits(wanted, facts.experts, self.multiple_of)
        groups = facts.router.groups
        step = groups * self.multiple_of // math.gcd(groups, self.multiple_of)
        reach = -(-facts.router.top_k // facts.router.topk_groups) * groups if groups > 1 else facts.router.top_k
        # Routers of this kind rank groups by the sum of their two best experts.
        least = max(reach - facts.router.fixed_experts, 2 * groups if groups > 1 else 1, wanted)
        return Limits(least, facts.experts, step)

    def make(self, layers: list[LayerFacts], skipped: set[str], average: float) -> Plan:
        """A plan that keeps `average` experts a layer over the layers that are not skipped."""
        counts = self.counts(layers, skipped, average)
        return Plan(layers=tuple(self.layer(facts, counts[facts.name]) for facts in layers))

    def counts(
        self, layers: list[LayerFacts], skipped: set[str], average: float, scores: dict[str, torch.Tensor] | None = None
    ) -> dict[str, int]:
        """How many experts each layer keeps, all of them where it is skipped. `scores` are those that could be made
        only while the layers were visited."""
        if self.budget.one_count:  # asks no scores
            return self.check(layers, skipped, average)
        known = scores or {}
        return self._shared_out(
            layers, skipped, average, lambda facts: known[facts.name] if facts.name in known else self.score(facts)
        )

    def check(self, layers: list[LayerFacts], skipped: set[str], average: float) -> dict[str, int]:
        """Raise now, without statistics, what `make` would raise about counts. The counts that are returned have the
        right total; which layer keeps more is not known yet."""
        return self._shared_out(layers, skipped, average, lambda facts: torch.ones(facts.experts))

    def _shared_out(
        self, layers: list[LayerFacts], skipped: set[str], average: float, score: Callable[[LayerFacts], torch.Tensor]
    ) -> dict[str, int]:
        chosen = [facts for facts in layers if facts.name not in skipped]
        if not chosen:
            raise MoepressError("every MoE layer is skipped: there is nothing to merge")
        limits = [self.limits(facts) for facts in chosen]
        made = self.budget.counts([score(facts) for facts in chosen], average, limits)
        whole = {facts.name: facts.experts for facts in layers}
        return whole | {facts.name: count for facts, count in zip(chosen, made, strict=True)}

    def score(self, facts: LayerFacts, saliency: Saliency | None = None) -> torch.Tensor:
        """(E,) of one layer; of those that stay if less than `facts.keep` is out of the question."""
        saliency = saliency or self.saliency
        if facts.keep is None:
            facts = replace(facts, keep=self.limits(facts).least)
        score_E = saliency.score(facts).double()
        if not torch.isfinite(score_E).all():
            raise MoepressError(f"layer {facts.name!r}: the saliency {saliency.name!r} is not finite")
        return score_E

    def candidates(self, facts: LayerFacts, count: int) -> dict[str, LayerPlan]:
        """One layer's plans by the saliency that proposed them, equal ones once."""
        plans: dict[str, LayerPlan] = {}
        for saliency in self.saliencies:
            plan = self.layer(facts, count, saliency)
            if plan not in plans.values():
                plans[saliency.name] = plan
        return plans

    def layer(self, facts: LayerFacts, count: int, saliency: Saliency | None = None) -> LayerPlan:
        """One layer's plan, once it is known how many experts it keeps."""
        if count == facts.experts:
            return LayerPlan.keep_all(facts.name, facts.experts)
        facts = replace(facts, keep=count)
        score_E = self.score(facts, saliency)
        router_groups = facts.router.groups if self.router != "redirect" else 1
        alone = self.guard.alone(facts)
        leaders = strongest(first(score_E, alone), count, router_groups)
        if missing := sorted(alone.difference(leaders)):
            raise MoepressError(
                f"layer {facts.name!r}: {count} experts are too few, since the guarded {missing} must stay as well"
            )
        similarity_EE = self.similarity.matrix(facts)
        members = self.grouping.groups_but(alone, score_E, similarity_EE, leaders, router_groups)
        if any(len(group) > 1 for group in members):
            self.found[facts.name] = similarity_EE.float().cpu()
        count_E = facts.statistics["usage"]["count"] if self.weigh_by == "usage" else score_E
        groups = tuple(
            Group(leader=group[0], members=tuple(group), weights=tuple(self.member_weights(count_E[group].tolist())))
            for group in members
        )
        kept = {expert for group in members for expert in group}
        dropped = tuple(e for e in range(facts.experts) if e not in kept)
        return LayerPlan(name=facts.name, experts=facts.experts, router=self.router, groups=groups, dropped=dropped)


def first(score_E: torch.Tensor, alone: frozenset[int]) -> torch.Tensor:
    """The scores with some experts before all others."""
    raised_E = score_E.clone()
    raised_E[sorted(alone)] += score_E.max() + 1
    return raised_E
