"""Carry out one layer's plan on its experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch

from moepress.align import MEMORY, Alignment, Pair, Solution, Solver, kinds, match
from moepress.merge.base import Expert, Members, Merge
from moepress.models.inputs import ExpertInputs, sample_inputs
from moepress.models.layer import ExpertBank, permute_units
from moepress.models.visit import LayerVisit
from moepress.plan import LayerPlan


@dataclass(frozen=True)
class Evidence:
    """What a merge may look at beside the weights of one layer."""

    inputs: dict[int, ExpertInputs] = field(default_factory=dict)
    """By leader: tokens that the group serves."""
    fisher: ExpertBank | None = None

    @classmethod
    def of(cls, visit: LayerVisit, plan: LayerPlan, tokens: int, seed: int) -> Evidence:
        """With at most `tokens` tokens of each group that has something to merge."""
        groups = [group for group in plan.groups if len(group.members) > 1]
        if not tokens or not groups:
            return cls()
        sampled = sample_inputs(visit, [group.members for group in groups], tokens, seed)
        return cls({group.leader: inputs for group, inputs in zip(groups, sampled, strict=True)})


@dataclass(frozen=True)
class MergedLayer:
    source: ExpertBank
    experts: Iterator[Expert]
    """One for each group of the plan, made when it is asked for: a second layer beside the first takes its memory."""
    solutions: list[Solution]
    """Every alignment that was made."""

    @cached_property
    def bank(self) -> ExpertBank:
        """All experts together."""
        made = list(self.experts)
        return self.source.map(lambda name, _: torch.stack([expert[name] for expert in made]))

    @property
    def gap(self) -> float:
        """The worst certified gap."""
        return max((solution.gap for solution in self.solutions), default=0.0)

    @property
    def solved(self) -> Counter[str]:
        """How many alignments were solved in which way."""
        return kinds(self.solutions)


def merge_layer(
    bank: ExpertBank,
    plan: LayerPlan,
    merge: Merge,
    alignment: Alignment,
    solver: Solver,
    memory: int = MEMORY,
    evidence: Evidence | None = None,
) -> MergedLayer:
    """Each group aligned to its leader and merged: as many experts as the plan has groups. All alignments of the layer
    are solved together, in at most `memory` bytes of cost matrices."""
    evidence = evidence or Evidence()
    followers = [(group.leader, e) for group in plan.groups for e in group.members if e != group.leader]
    pairs = [Pair(bank.expert(leader), bank.expert(e), evidence.inputs.get(leader)) for leader, e in followers]
    solutions = match(alignment, solver, pairs, memory) or []
    order = {e: solution.order for (_, e), solution in zip(followers, solutions, strict=False)}

    def ordered(source: ExpertBank, e: int) -> Expert:
        return permute_units(source.expert(e), order[e]) if e in order else source.expert(e)

    def merged() -> Iterator[Expert]:
        for group in plan.groups:
            if len(group.members) == 1:
                yield bank.expert(group.leader)
                continue
            weight = dict(zip(group.members, group.weights, strict=True))
            leader_first = sorted(group.members, key=lambda e: e != group.leader)
            yield merge.merge(
                Members(
                    experts=[ordered(bank, e) for e in leader_first],
                    weights=[weight[e] for e in leader_first],
                    inputs=evidence.inputs.get(group.leader),
                    fisher=None if evidence.fisher is None else [ordered(evidence.fisher, e) for e in leader_first],
                )
            )

    return MergedLayer(bank, merged(), solutions)
