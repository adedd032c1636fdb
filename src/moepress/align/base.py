"""What an alignment is, and its two uses: a group to its leader, or a whole bank to one expert."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from moepress.align.solvers import Solver
from moepress.models.layer import ExpertBank, permute_units
from moepress.registry import Registry

Expert = dict[str, Tensor]


@dataclass(frozen=True)
class Aligned:
    """Experts in the unit order of the reference, and how far each matching can be from the best (relative)."""

    experts: list[Expert]
    gaps: list[float]


class Alignment(ABC):
    name: ClassVar[str]
    paper: ClassVar[str] = ""

    @abstractmethod
    def cost(self, reference: Expert, other: Expert) -> Tensor | None:
        """(F, F): what is gained by putting unit j of `other` in the place of unit i of `reference`. None: leave
        `other` as it is."""


def align_group(alignment: Alignment, solver: Solver, reference: Expert, others: list[Expert]) -> Aligned:
    """Each expert of `others` in the order of `reference`."""
    experts, gaps = [], []
    for other in others:
        cost_FF = alignment.cost(reference, other)
        if cost_FF is None:
            experts.append(other)
            continue
        solution = solver.solve(cost_FF)
        experts.append(permute_units(other, solution.order.to(cost_FF.device)))
        gaps.append(solution.gap)
    return Aligned(experts, gaps)


def align_bank(alignment: Alignment, solver: Solver, bank: ExpertBank, reference: int = 0) -> tuple[ExpertBank, list[float]]:
    """All experts of a layer in the order of one of them, in new tensors."""
    others = [e for e in range(bank.num_experts) if e != reference]
    aligned = align_group(alignment, solver, bank.expert(reference), [bank.expert(e) for e in others])
    changed = bank.map(lambda _, tensor: tensor.clone())
    for e, expert in zip(others, aligned.experts, strict=True):
        for name, tensor in expert.items():
            changed.tensors()[name][e].copy_(tensor)
    return changed, aligned.gaps


ALIGNMENTS: Registry[Alignment] = Registry("alignment")
