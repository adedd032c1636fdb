"""What a solver is, and what it must say about each solution.

Shape suffixes: N problems, n some of them, F hidden units.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from moepress.errors import MoepressError
from moepress.registry import Registry

Kind = Literal["proof", "auction", "polish", "exact"]
"""How a problem was solved: every row got its own maximum, which no assignment can beat (at some prices); by auction;
by an exact solver that started from the prices of an auction that was not close enough; by an exact solver alone."""


@dataclass(frozen=True)
class Solution:
    order: Tensor
    """(F,) int64, where the costs are: unit `order[i]` of the other expert takes the place of unit i of the
    reference."""
    gap: float
    """Proven bound on (best possible − reached) / |reached|; 0 where the solver is exact."""
    kind: Kind = "exact"
    bids: int = 0
    """Bids of the auction. An `exact` solution with bids is one whose auction ran out of them."""


class Solver(ABC):
    name: ClassVar[str]
    paper: ClassVar[str] = ""

    @abstractmethod
    def solve_many(self, costs_NFF: Tensor, norms_NF: Tensor | None = None) -> list[Solution]:
        """The assignment with the largest total, for each problem. `norms_NF` are the squared norms of the other
        expert's units where a cost is an inner product: a solver may use them to prove a solution without a search."""

    def solve(self, cost_FF: Tensor, norm_F: Tensor | None = None) -> Solution:
        return self.solve_many(cost_FF[None], None if norm_F is None else norm_F[None])[0]


def checked(costs_NFF: Tensor) -> Tensor:
    """The costs as solvers want them: N square matrices. Whether they are finite, each solver finds out itself."""
    if costs_NFF.dim() != 3 or costs_NFF.shape[1] != costs_NFF.shape[2] or costs_NFF.shape[1] == 0:
        raise MoepressError(
            f"costs of an assignment must be square matrices, not of shape {tuple(costs_NFF.shape[1:])}"
        )
    return costs_NFF.detach()


def not_finite() -> MoepressError:
    return MoepressError("costs of an assignment must be finite: the experts hold NaN or infinite weights")


def certified_gap(cost_FF: Tensor, order_F: Tensor, price_F: Tensor) -> float:
    """How far an assignment can be from the best one, proven by any prices (weak duality).

    With prices p no assignment has a larger total than Σ p_j + Σ_i max_j (c_ij − p_j). What was reached differs from
    that by what each row misses of its own maximum: a sum of small positive numbers, which loses no digits.
    """
    offered_FF = cost_FF.double() - price_F.double().to(cost_FF.device)
    column_F1 = order_F.to(cost_FF.device)[:, None]
    missed = (offered_FF.amax(dim=1) - offered_FF.gather(1, column_F1)[:, 0]).sum()
    return float(relative_gap(missed, cost_FF.gather(1, column_F1).double().sum()))


def relative_gap(missed: Tensor, reached: Tensor) -> Tensor:
    """missed / |reached|, and 0 where nothing is missed, whatever was reached."""
    return torch.where(missed > 0, missed / reached.abs(), torch.zeros_like(missed))


T = TypeVar("T")
R = TypeVar("R")


def in_threads(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Work that releases the GIL, on as many threads as torch may use."""
    threads = min(len(items), torch.get_num_threads())
    if threads <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


SOLVERS: Registry[Solver] = Registry("solver")
