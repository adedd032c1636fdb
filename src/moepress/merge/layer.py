"""Carry out one layer's plan on its experts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from moepress.align import MEMORY, Alignment, Solution, Solver, kinds, match
from moepress.merge.base import Merge
from moepress.models.layer import ExpertBank, permute_units
from moepress.plan import LayerPlan


@dataclass(frozen=True)
class MergedLayer:
    bank: ExpertBank
    solutions: list[Solution]
    """Every alignment that was made."""

    @property
    def gap(self) -> float:
        """The worst certified gap."""
        return max((solution.gap for solution in self.solutions), default=0.0)

    @property
    def solved(self) -> Counter[str]:
        """How many alignments were solved in which way."""
        return kinds(self.solutions)


def merge_layer(
    bank: ExpertBank, plan: LayerPlan, merge: Merge, alignment: Alignment, solver: Solver, memory: int = MEMORY
) -> MergedLayer:
    """Each group aligned to its leader and merged: as many experts as the plan has groups. All alignments of the layer
    are solved together, in at most `memory` bytes of cost matrices."""
    followers = [(group.leader, e) for group in plan.groups for e in group.members if e != group.leader]
    solutions = match(alignment, solver, [(bank.expert(leader), bank.expert(e)) for leader, e in followers], memory)
    order = {e: solution.order for (_, e), solution in zip(followers, solutions or [], strict=False)}
    merged: list[dict[str, torch.Tensor]] = []
    for group in plan.groups:
        if len(group.members) == 1:
            merged.append(bank.expert(group.leader))
            continue
        weight = dict(zip(group.members, group.weights, strict=True))
        leader_first = sorted(group.members, key=lambda e: e != group.leader)
        members = [permute_units(bank.expert(e), order[e]) if e in order else bank.expert(e) for e in leader_first]
        merged.append(merge.merge(members, [weight[e] for e in leader_first]))
    stacked = bank.map(lambda name, _: torch.stack([expert[name] for expert in merged]))
    return MergedLayer(stacked, solutions or [])
