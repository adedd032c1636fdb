"""Carry out one layer's plan on its experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moepress.align import Alignment, Solver, align_group
from moepress.merge.base import Merge
from moepress.models.layer import ExpertBank
from moepress.plan import LayerPlan


@dataclass(frozen=True)
class MergedLayer:
    bank: ExpertBank
    gaps: list[float]
    """Certified gap of every alignment that was made."""


def merge_layer(bank: ExpertBank, plan: LayerPlan, merge: Merge, alignment: Alignment, solver: Solver) -> MergedLayer:
    """Each group aligned to its leader and merged: as many experts as the plan has groups."""
    merged: list[dict[str, torch.Tensor]] = []
    gaps: list[float] = []
    for group in plan.groups:
        if len(group.members) == 1:
            merged.append(bank.expert(group.leader))
            continue
        others = [e for e in group.members if e != group.leader]
        aligned = align_group(alignment, solver, bank.expert(group.leader), [bank.expert(e) for e in others])
        weight = dict(zip(group.members, group.weights, strict=True))
        members = [bank.expert(group.leader), *aligned.experts]
        merged.append(merge.merge(members, [weight[e] for e in (group.leader, *others)]))
        gaps += aligned.gaps
    stacked = bank.map(lambda name, _: torch.stack([expert[name] for expert in merged]))
    return MergedLayer(stacked, gaps)
