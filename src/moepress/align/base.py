"""What an alignment is, and its two uses: a group to its leader, or a whole bank to one expert.

Shape suffixes: N problems (pairs of experts), F hidden units, K numbers that describe a unit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moepress.align.costs import Operands, fill_costs, squared_norms
from moepress.align.solvers import Solution, Solver
from moepress.models.inputs import ExpertInputs
from moepress.models.layer import ExpertBank, permute_units
from moepress.registry import Registry

Expert = dict[str, Tensor]
MEMORY = 2 * 10**9
"""Bytes of cost matrices that are held at a time, where nothing else is said."""


class Alignment(ABC):
    name: ClassVar[str]
    paper: ClassVar[str] = ""
    operands: Operands = "stored"
    """What the cost matrices are multiplied from (see `fill_costs`)."""
    needs_visit: ClassVar[bool] = False
    """Whether it looks at calibration tokens (at most `tokens` of them), not at weights alone."""
    tokens: int = 0

    @abstractmethod
    def units(self, expert: Expert, inputs: ExpertInputs | None) -> list[Tensor] | None:
        """Matrices (F, K), of any number and widths, with a row for each hidden unit. What is gained by putting one
        unit in the place of another is the inner product of their rows, summed over the matrices. None: experts stay
        as they are. `inputs` are the same for both experts of a pair."""


@dataclass(frozen=True)
class Aligned:
    """Experts in the unit order of the reference, and how each order was found."""

    experts: list[Expert]
    solutions: list[Solution]

    @property
    def gaps(self) -> list[float]:
        """How far each matching can be from the best (relative)."""
        return [solution.gap for solution in self.solutions]


@dataclass(frozen=True)
class Pair:
    """Two experts, the second of which is to be put in the order of the first."""

    reference: Expert
    other: Expert
    inputs: ExpertInputs | None = None


def match(alignment: Alignment, solver: Solver, pairs: Sequence[Pair], memory: int = MEMORY) -> list[Solution] | None:
    """The order of units of the second expert of each pair that fits the first best. None: no alignment.

    As many pairs are solved together as have cost matrices that fit into `memory` bytes, and at least one.
    """
    if not pairs or alignment.units(pairs[0].reference, pairs[0].inputs) is None:
        return None
    up_FD = pairs[0].reference["up_EFD"]
    F = up_FD.shape[0]
    together = min(len(pairs), max(1, memory // (4 * F * F)))
    if up_FD.device.type == "cpu":  # more than that are not solved at the same time
        together = min(together, 2 * torch.get_num_threads())
    costs_NFF = up_FD.new_empty((together, F, F), dtype=torch.float32)
    solutions: list[Solution] = []
    for start in range(0, len(pairs), together):
        chunk = pairs[start : start + together]
        rows = [(_units(alignment, p.reference, p.inputs), _units(alignment, p.other, p.inputs)) for p in chunk]
        fill_costs(costs_NFF[: len(rows)], rows, alignment.operands)
        solutions += solver.solve_many(costs_NFF[: len(rows)], squared_norms([other for _, other in rows]))
    return solutions


def _units(alignment: Alignment, expert: Expert, inputs: ExpertInputs | None) -> list[Tensor]:
    units = alignment.units(expert, inputs)
    assert units is not None  # as for the first pair
    return units


def align_group(
    alignment: Alignment, solver: Solver, reference: Expert, others: list[Expert], memory: int = MEMORY
) -> Aligned:
    """Each expert of `others` in the order of `reference`."""
    solutions = match(alignment, solver, [Pair(reference, other) for other in others], memory)
    if solutions is None:
        return Aligned(others, [])
    ordered = [permute_units(other, solution.order) for other, solution in zip(others, solutions, strict=True)]
    return Aligned(ordered, solutions)


def align_bank(
    alignment: Alignment,
    solver: Solver,
    bank: ExpertBank,
    reference: int = 0,
    memory: int = MEMORY,
    inputs: ExpertInputs | None = None,
) -> tuple[ExpertBank, list[Solution]]:
    """All experts of a layer in the order of one of them, in new tensors."""
    others = [e for e in range(bank.num_experts) if e != reference]
    pairs = [Pair(bank.expert(reference), bank.expert(e), inputs) for e in others]
    solutions = match(alignment, solver, pairs, memory) or []
    changed = bank.map(lambda _, tensor: tensor.clone())
    for e, solution in zip(others, solutions, strict=False):
        for name, tensor in permute_units(bank.expert(e), solution.order).items():
            changed.tensors()[name][e].copy_(tensor)
    return changed, solutions


def kinds(solutions: Iterable[Solution]) -> Counter[str]:
    """How many problems were solved in which way."""
    return Counter(solution.kind for solution in solutions)


ALIGNMENTS: Registry[Alignment] = Registry("alignment")
