"""The auction on CUDA, in Triton: one program a problem, all problems in one launch.

The prices and owners of all columns stay in the registers of the program; a bid reads one row. Programs share nothing
and use no atomics, so results are the same every time, and the host does not wait before the launch has ended. A bid
needs the one before it, so the time is that of the longest auction, and is about the same for 20 problems and for 200.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moepress.align.solvers.base import not_finite, relative_gap

WARPS = 16
"""Of one auction: the fastest of 4, 8, 16 and 32 for 3072 columns on an H200."""


def prove(costs_NFF: Tensor, which: list[int], prices_nF: Tensor | None) -> tuple[Tensor, Tensor]:
    """The column of each row's maximum at these prices, and whether all of them differ: then no assignment is
    better. Refuses costs that are not finite."""
    if prices_nF is None:
        prices_nF = costs_NFF.new_zeros(len(which), costs_NFF.shape[1])
    order_nF, best_nF = _row_maxima(costs_NFF, which, prices_nF)
    if not bool(torch.isfinite(best_nF).all()):
        raise not_finite()
    times_taken_nF = torch.zeros_like(order_nF).scatter_add_(1, order_nF, torch.ones_like(order_nF))
    return order_nF, (times_taken_nF == 1).all(dim=1)


def bid(
    costs_NFF: Tensor, which: list[int], first_n: Tensor, last_n: Tensor, shrink: float, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Auctions with epsilon from `first` to `last`: orders, prices, bids made, and whether all rows got a column
    within the limit of bids."""
    n, F = len(which), costs_NFF.shape[1]
    prices_nF = costs_NFF.new_zeros(n, F)
    owner_nF = torch.full((n, F), -1, dtype=torch.int32, device=costs_NFF.device)
    bids_n = torch.zeros(n, dtype=torch.int32, device=costs_NFF.device)
    _auction[(n,)](
        costs_NFF,
        _index(which, costs_NFF),
        prices_nF,
        owner_nF,
        bids_n,
        first_n,
        last_n,
        F,
        costs_NFF.stride(0),
        costs_NFF.stride(1),
        float(shrink),
        min(limit, 2**31 - 2),
        BLOCK=triton.next_power_of_2(F),
        num_warps=WARPS if F > 1024 else 4,
    )
    columns_nF = torch.arange(F, device=costs_NFF.device).expand(n, F)
    order_nF = torch.zeros(n, F, dtype=torch.int64, device=costs_NFF.device)
    order_nF.scatter_(1, owner_nF.long().clamp_min(0), columns_nF)
    return order_nF, prices_nF, bids_n.clamp_max(limit), bids_n <= limit


def certify(costs_NFF: Tensor, which: list[int], order_nF: Tensor, prices_nF: Tensor) -> Tensor:
    """The certified gap of each assignment, in float64 from the costs and prices alone (see `certified_gap`)."""
    F = costs_NFF.shape[1]
    _, best_nF = _row_maxima(costs_NFF, which, prices_nF)
    row_nF = _index(which, costs_NFF)[:, None] * F + torch.arange(F, device=costs_NFF.device)
    own_nF = costs_NFF.reshape(-1)[row_nF * F + order_nF].double()
    missed_n = (best_nF - (own_nF - prices_nF.double().gather(1, order_nF))).sum(dim=1)
    return relative_gap(missed_n, own_nF.sum(dim=1))


def _row_maxima(costs_NFF: Tensor, which: list[int], prices_nF: Tensor) -> tuple[Tensor, Tensor]:
    n, F = len(which), costs_NFF.shape[1]
    column_nF = torch.empty(n, F, dtype=torch.int64, device=costs_NFF.device)
    best_nF = torch.empty(n, F, dtype=torch.float64, device=costs_NFF.device)
    _maximum_of_row[(F, n)](
        costs_NFF,
        _index(which, costs_NFF),
        prices_nF.contiguous(),
        column_nF,
        best_nF,
        F,
        costs_NFF.stride(0),
        costs_NFF.stride(1),
        BLOCK=triton.next_power_of_2(F),
        num_warps=8 if F > 1024 else 4,
    )
    return column_nF, best_nF


def _index(which: list[int], like: Tensor) -> Tensor:
    return torch.tensor(which, dtype=torch.int64, device=like.device)


@triton.jit
def _maximum_of_row(costs, which, prices, columns, bests, F, problem_stride, row_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < F
    start = costs + tl.load(which + place) * problem_stride + row * row_stride
    cost = tl.load(start + column, mask=inside, other=0.0).to(tl.float64)
    price = tl.load(prices + place * F + column, mask=inside, other=0.0).to(tl.float64)
    offer = tl.where(inside, cost - price, float("-inf"))
    best, at = tl.max(offer, axis=0, return_indices=True)
    # A difference with itself is 0 unless the number is NaN or infinite.
    strange = tl.max(tl.where(cost - cost == 0.0, 0, 1), axis=0)
    tl.store(columns + place * F + row, at.to(tl.int64))
    tl.store(bests + place * F + row, tl.where(strange > 0, float("nan"), best))


@triton.jit
def _two_best(best_a, column_a, owner_a, second_a, best_b, column_b, owner_b, second_b):  # type: ignore[no-untyped-def]
    """(best offer, its column, who owns that column, second best offer) of two sets of columns. Equal offers: the
    lower column, so that the order of the reduction does not matter."""
    first = (best_a > best_b) | ((best_a == best_b) & (column_a < column_b))
    best = tl.where(first, best_a, best_b)
    column = tl.where(first, column_a, column_b)
    owner = tl.where(first, owner_a, owner_b)
    second = tl.maximum(tl.where(first, best_b, best_a), tl.maximum(second_a, second_b))
    return best, column, owner, second


@triton.jit
def _auction(  # type: ignore[no-untyped-def]
    costs,
    which,
    prices,
    owners,
    bids_made,
    firsts,
    lasts,
    F,
    problem_stride,
    row_stride,
    shrink,
    limit,
    BLOCK: tl.constexpr,
):
    """Gauss–Seidel auction with epsilon scaling: a row bids, the row that it displaces bids next."""
    place = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < F
    start = costs + tl.load(which + place) * problem_stride
    price = tl.zeros([BLOCK], tl.float32)
    owner = tl.full([BLOCK], -1, tl.int32)
    nothing = tl.full([BLOCK], float("-inf"), tl.float32)
    eps, last = tl.load(firsts + place), tl.load(lasts + place)
    bids = 0
    going = 1
    while going == 1:
        owner = tl.full([BLOCK], -1, tl.int32)
        next_row = 0
        i = 0
        while next_row < F:
            row = start + i.to(tl.int64) * row_stride  # type: ignore[attr-defined]
            cost = tl.load(row + column, mask=inside, other=float("-inf"))
            best, j, displaced, second = tl.reduce((cost - price, column, owner, nothing), 0, _two_best)
            hit = column == j
            price = tl.where(hit, price + (best - second + eps), price)
            owner = tl.where(hit, i, owner)
            free = displaced < 0
            next_row = tl.where(free, next_row + 1, next_row)
            i = tl.where(free, next_row, displaced)
            bids += 1
            if bids > limit:
                next_row = F
        going = tl.where((eps <= last) | (bids > limit), 0, 1)
        eps = tl.maximum(eps / shrink, last)
    tl.store(prices + place * F + column, price, mask=inside)
    tl.store(owners + place * F + column, owner, mask=inside)
    tl.store(bids_made + place, bids)
