from __future__ import annotations

import importlib
import importlib.util
import warnings
from dataclasses import dataclass, field
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from moepress.align.solvers.base import SOLVERS, Kind, Solution, Solver, checked
from moepress.align.solvers.exact import best_orders
from moepress.errors import MoepressError

FIRST, LAST, SHRINK = 0.05, 1e-5, 20.0
"""Epsilon scaling, in standard deviations of the costs. A first epsilon much above it lets prices fly past each other
(twice the bids at 0.5), one far below it lets rows that want the same columns outbid each other in small steps."""


@SOLVERS.register("auction")
@dataclass(frozen=True)
class Auction(Solver):
    """Row maxima where they prove themselves, else a Gauss–Seidel auction with epsilon scaling; compiled for the CPU
    (one problem a thread) and for CUDA (all problems in one launch). Certified; polished by SciPy above `gap`."""

    paper = "Bertsekas, https://doi.org/10.1007/BF02186476"

    gap: float = 1e-4
    """The largest certified gap that is accepted without polishing by the exact solver; 0 makes every answer exact."""
    bids: int = 300
    """Bids per row after which an auction gives up and the exact solver takes over. Usual are 5 to 25."""

    def solve_many(self, costs_NFF: Tensor, norms_NF: Tensor | None = None) -> list[Solution]:
        costs_NFF = checked(costs_NFF)
        if not len(costs_NFF):
            return []
        run = Run.of(costs_NFF, self.gap)
        run.prove(norms_NF)
        if run.left:
            run.settle(run.bid(self.bids * costs_NFF.shape[1]))
        return [run.solved[problem] for problem in range(len(costs_NFF))]


class Auctioned(NamedTuple):
    order_nF: Tensor
    prices_nF: Tensor
    bids_n: Tensor
    finished_n: Tensor
    """False where the limit of bids was reached first."""


@dataclass
class Run:
    """The problems of one call, and what became of them so far: `prove`, then `bid` and `settle` what is left."""

    backend: ModuleType
    exact_NFF: Tensor
    """The costs as given: what certificates and the exact solver go by."""
    costs_NFF: Tensor
    """float32, for the search."""
    gap: float
    device: torch.device
    """Where the costs came from, and orders go to."""
    solved: dict[int, Solution] = field(default_factory=dict)

    @classmethod
    def of(cls, costs_NFF: Tensor, gap: float) -> Run:
        device = costs_NFF.device
        backend = backend_for(device)
        if backend.__name__.endswith("_cpu"):
            costs_NFF = costs_NFF.cpu()
        if costs_NFF.dtype in (torch.float32, torch.bfloat16, torch.float16):
            costs_NFF = costs_NFF.float().contiguous()
            return cls(backend, costs_NFF, costs_NFF, gap, device)
        # An offset of a row does not change the best assignment, but would take the digits that tell columns apart.
        exact_NFF = costs_NFF.double().contiguous()
        shifted_NFF = (exact_NFF - exact_NFF.amax(dim=2, keepdim=True)).float()
        return cls(backend, exact_NFF, shifted_NFF, gap, device)

    @property
    def left(self) -> list[int]:
        return [problem for problem in range(len(self.costs_NFF)) if problem not in self.solved]

    def prove(self, norms_NF: Tensor | None) -> None:
        """Accept the row maxima where they are an assignment: at prices 0, or at half the squared norms of the other
        expert's units, where the maximum of a row is its nearest unit."""
        self._prove_at(None)
        if norms_NF is not None and self.left:
            self._prove_at(0.5 * norms_NF.detach())

    def _prove_at(self, prices_NF: Tensor | None) -> None:
        left = self.left
        prices_nF = None if prices_NF is None else prices_NF.to(self.costs_NFF)[left].contiguous()
        order_nF, proven_n = self.backend.prove(self.costs_NFF, left, prices_nF)
        places = torch.nonzero(proven_n.cpu())[:, 0].tolist()
        gaps = [0.0] * len(places)
        if places and (prices_nF is not None or self.exact_NFF is not self.costs_NFF):
            # Rounded numbers chose these maxima: the certificate says what that can have cost.
            certain_nF = torch.zeros_like(order_nF, dtype=torch.float32) if prices_nF is None else prices_nF
            problems = [left[place] for place in places]
            gaps = self.backend.certify(self.exact_NFF, problems, order_nF[places], certain_nF[places]).tolist()
        for place, gap in zip(places, gaps, strict=True):
            if gap <= self.gap:
                self.accept(left[place], order_nF[place], gap, "proof")

    def bid(self, limit: int) -> Auctioned:
        first_n, last_n = epsilons(self.costs_NFF, self.left)
        return Auctioned(*self.backend.bid(self.costs_NFF, self.left, first_n, last_n, SHRINK, limit))

    def settle(self, auctioned: Auctioned) -> None:
        """Certify what the auctions found, accept what is close enough, and solve the rest exactly."""
        left = self.left
        order_nF, prices_nF, bids_n, finished_n = auctioned
        gaps = self.backend.certify(self.exact_NFF, left, order_nF, prices_nF).tolist()
        bids, finished = bids_n.tolist(), finished_n.tolist()
        poor: list[int] = []
        for place, problem in enumerate(left):
            if finished[place] and gaps[place] <= self.gap:
                self.accept(problem, order_nF[place], gaps[place], "auction", bids[place])
            else:
                poor.append(place)
        prices_nF = torch.where(finished_n[:, None], prices_nF, torch.zeros_like(prices_nF))
        orders = best_orders(self.exact_NFF, [left[place] for place in poor], prices_nF[poor])
        for place, order_F in zip(poor, orders, strict=True):
            self.accept(left[place], order_F, 0.0, "polish" if finished[place] else "exact", bids[place])

    def accept(self, problem: int, order_F: Tensor, gap: float, kind: Kind, bids: int = 0) -> None:
        self.solved[problem] = Solution(order_F.to(self.device), gap, kind, bids)


def backend_for(device: torch.device) -> ModuleType:
    """`auction_cuda` for CUDA, `auction_cpu` for everything else: modules with `prove`, `bid` and `certify`."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton"):
            return importlib.import_module("moepress.align.solvers.auction_cuda")
        warnings.warn("triton is not installed: alignment is solved on the CPU", stacklevel=2)
    if not importlib.util.find_spec("numba"):
        raise MoepressError("the auction needs numba: pip install numba, or set align.solver to scipy")
    return importlib.import_module("moepress.align.solvers.auction_cpu")


def epsilons(costs_NFF: Tensor, which: list[int]) -> tuple[Tensor, Tensor]:
    """The first and the last epsilon of each auction, from the spread of a few rows of its costs. The last is not so
    small that adding it to a price could change nothing."""
    step = max(1, costs_NFF.shape[1] // 64)
    sample_nR = costs_NFF[:, ::step][which].flatten(1).double()
    largest_n = sample_nR.abs().amax(dim=1)
    spread_n = sample_nR.std(dim=1, correction=0)
    spread_n = torch.where(spread_n > 0, spread_n, torch.where(largest_n > 0, largest_n, torch.ones_like(largest_n)))
    smallest_n = 2 * torch.finfo(torch.float32).eps * largest_n
    last_n = torch.maximum(LAST * spread_n, smallest_n)
    return torch.maximum(FIRST * spread_n, last_n).float(), last_n.float()
