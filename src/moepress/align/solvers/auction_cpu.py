"""The auction on a CPU, compiled by numba. Every function releases the GIL: problems run side by side in threads.

A bid needs the best and the second best column of one row at the current prices. Reading the whole row for that would
make the memory the limit, so each row remembers a short list of its best columns and a bound that no other column
exceeded when the list was made. Prices only ever rise: as long as the second best of the list is above that bound, the
list decides the bid, and the row is not read. One bid in six reads a row.

Whole rows are read as blocks of `DEPTH` × `LANES` columns, and maxima are taken lane by lane: that becomes vector
instructions, which a running maximum over the row does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from moepress.align.solvers.base import in_threads, not_finite, relative_gap

LANES, DEPTH = 64, 16
BLOCK = LANES * DEPTH
LISTED = 32
"""Columns that a row remembers: 8 bytes each, so that the lists of 3072 rows fit into a 1 MB cache."""
WANTED = 16
"""Columns that a list gets at the least. More would ask for more than `LISTED` too often."""
FINITE_BITS, EXPONENT = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
compiled = njit(nogil=True, cache=True)
# NaN never comes this far, and the sign of zero does not matter: without these two, no maximum is a vector instruction.
compiled_for_vectors = njit(nogil=True, cache=True, fastmath={"nnan", "nsz"})


def prove(costs_NFF: Tensor, which: list[int], prices_nF: Tensor | None) -> tuple[Tensor, Tensor]:
    """The column of each row's maximum at these prices, and whether all of them differ: then no assignment is
    better. Refuses costs that are not finite."""
    F = costs_NFF.shape[1]
    order_nF = torch.zeros(len(which), F, dtype=torch.int64)

    def one(place: int) -> bool:
        cost = costs_NFF[which[place]].numpy()
        bits = cost.view(np.int32)
        price = np.zeros(F, np.float32) if prices_nF is None else prices_nF[place].numpy()
        seen, finite = _distinct_maxima(cost, bits, price, order_nF[place].numpy(), _row(F))
        if not finite or not _finite(bits[seen:].reshape(-1)):
            raise not_finite()
        return bool(seen == F)

    return order_nF, torch.tensor(in_threads(one, range(len(which))))


def bid(
    costs_NFF: Tensor, which: list[int], first_n: Tensor, last_n: Tensor, shrink: float, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Auctions with epsilon from `first` to `last`: orders, prices, bids made, and whether all rows got a column
    within the limit of bids."""
    F = costs_NFF.shape[1]
    order_nF = torch.zeros(len(which), F, dtype=torch.int64)
    prices_nF = torch.zeros(len(which), F)

    def one(place: int) -> int:
        cost, price, order = (t.numpy() for t in (costs_NFF[which[place]], prices_nF[place], order_nF[place]))
        eps = np.float32(first_n[place].item()), np.float32(last_n[place].item()), np.float32(shrink)
        return int(_auction(cost, *eps, limit, price, order, _row(F)))

    bids_n = torch.tensor(in_threads(one, range(len(which))), dtype=torch.int64)
    return order_nF, prices_nF, bids_n.clamp_max(limit), bids_n <= limit


def certify(costs_NFF: Tensor, which: list[int], order_nF: Tensor, prices_nF: Tensor) -> Tensor:
    """The certified gap of each assignment, in float64 from the costs and prices alone (see `certified_gap`)."""

    def one(place: int) -> tuple[float, float]:
        cost, price, order = (t.numpy() for t in (costs_NFF[which[place]], prices_nF[place], order_nF[place]))
        return _missed(cost, price.astype(np.float64), order, _row(len(price), np.float64))

    sums = torch.tensor(in_threads(one, range(len(which))), dtype=torch.float64).reshape(-1, 2)
    return relative_gap(sums[:, 0], sums[:, 1])


def _row(columns: int, dtype: Any = np.float32) -> np.ndarray:
    """Room for one row, up to whole blocks; what lies behind the row never is a maximum."""
    return np.full(-(-columns // BLOCK) * BLOCK, -np.inf, dtype)


@compiled_for_vectors
def _offer(cost_F, price_F, offer_F):  # type: ignore[no-untyped-def]
    for j in range(cost_F.shape[0]):
        offer_F[j] = cost_F[j] - price_F[j]


@compiled_for_vectors
def _lane_maxima(offer_F, lanes):  # type: ignore[no-untyped-def]
    """The maximum of each lane of each block: `lanes` has `LANES` entries a block."""
    for block in range(lanes.shape[0] // LANES):
        # Unsigned: an index that could be negative keeps the loops from becoming vector instructions.
        start, place = np.uint64(block * BLOCK), np.uint64(block * LANES)
        for lane in range(np.uint64(LANES)):
            best = offer_F[start + lane]
            for depth in range(np.uint64(1), np.uint64(DEPTH)):
                value = offer_F[start + depth * np.uint64(LANES) + lane]
                if value > best:
                    best = value
            lanes[place + lane] = best


@compiled_for_vectors
def _across_blocks(lanes, across):  # type: ignore[no-untyped-def]
    """The maximum of each lane over all blocks."""
    for lane in range(np.uint64(LANES)):
        best = lanes[lane]
        for block in range(np.uint64(1), np.uint64(lanes.shape[0] // LANES)):
            value = lanes[block * np.uint64(LANES) + lane]
            if value > best:
                best = value
        across[lane] = best


@compiled
def _maximum(lanes):  # type: ignore[no-untyped-def]
    best = lanes[0]
    for k in range(1, lanes.shape[0]):
        if lanes[k] > best:
            best = lanes[k]
    return best


@compiled
def _column_of(offer_F, lanes, value):  # type: ignore[no-untyped-def]
    for k in range(lanes.shape[0]):
        if lanes[k] == value:
            j = (k // LANES) * BLOCK + k % LANES
            while offer_F[j] != value:
                j += LANES
            return j
    return 0


@compiled
def _finite(bits):  # type: ignore[no-untyped-def]
    largest = np.int32(0)
    for k in range(bits.shape[0]):
        largest = max(largest, bits[k] & FINITE_BITS)
    return largest < EXPONENT


@compiled
def _distinct_maxima(cost, bits, price, order, offer):  # type: ignore[no-untyped-def]
    """Fill `order` until a column comes a second time; the rows seen (all of them: proven), and whether finite."""
    F = cost.shape[0]
    taken = np.zeros(F, np.bool_)
    lanes = np.empty(offer.shape[0] // DEPTH, np.float32)
    for i in range(F):
        if not _finite(bits[i]):
            return i, False
        _offer(cost[i], price, offer)
        _lane_maxima(offer, lanes)
        j = _column_of(offer, lanes, _maximum(lanes))
        if taken[j]:
            return i, True
        taken[j] = True
        order[i] = j
    return F, True


@compiled
def _missed(cost, price, order, offer):  # type: ignore[no-untyped-def]
    """What the rows miss of their maxima at these prices, and what the assignment reaches."""
    missed, reached = 0.0, 0.0
    lanes = np.empty(offer.shape[0] // DEPTH, np.float64)
    across = np.empty(LANES, np.float64)
    for i in range(cost.shape[0]):
        _offer(cost[i], price, offer)
        _lane_maxima(offer, lanes)
        _across_blocks(lanes, across)
        missed += _maximum(across) - offer[order[i]]
        reached += np.float64(cost[i, order[i]])
    return missed, reached


@compiled
def _rank(values, rank, room):  # type: ignore[no-untyped-def]
    """The value that has `rank` larger ones (quickselect)."""
    room[:] = values
    low, high = 0, values.shape[0] - 1
    while low < high:
        pivot = room[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while room[i] > pivot:
                i += 1
            while room[j] < pivot:
                j -= 1
            if i <= j:
                room[i], room[j] = room[j], room[i]
                i += 1
                j -= 1
        if rank <= j:
            high = j
        elif rank >= i:
            low = i
        else:
            break
    return room[rank]


@compiled
def _collect(cost_F, offer_F, lanes, bound, columns, values):  # type: ignore[no-untyped-def]
    """List the columns that offer `bound` or more, the best of them where the list is too short: how many, and what
    no other column exceeds."""
    listed, outside = 0, bound
    for k in range(lanes.shape[0]):
        if lanes[k] < bound:
            continue
        j = (k // LANES) * BLOCK + k % LANES
        for _ in range(DEPTH):
            offer = offer_F[j]
            if listed < columns.shape[0]:
                if offer >= bound:
                    columns[listed], values[listed] = j, cost_F[j]
                    listed += 1
            elif offer > outside:
                place = _least(offer_F, columns)
                least = offer_F[columns[place]]
                if offer > least:
                    columns[place], values[place] = j, cost_F[j]
                outside = max(outside, min(offer, least))
            j += LANES
    return listed, outside


@compiled
def _least(offer_F, columns):  # type: ignore[no-untyped-def]
    least = 0
    for place in range(1, columns.shape[0]):
        if offer_F[columns[place]] < offer_F[columns[least]]:
            least = place
    return least


@compiled_for_vectors
def _two_best(columns, values, listed, price):  # type: ignore[no-untyped-def]
    best, second, column = np.float32(-np.inf), np.float32(-np.inf), 0
    for place in range(listed):
        j = columns[place]
        offer = values[place] - price[j]
        if offer > second:
            if offer > best:
                best, second, column = offer, best, j
            else:
                second = offer
    return best, second, column


@compiled
def _auction(cost, eps, last, shrink, limit, price, order, offer):  # type: ignore[no-untyped-def]
    """Gauss–Seidel auction with epsilon scaling: a row bids, the row that it displaces bids next. Returns the bids
    made; more than `limit` means that it gave up."""
    F = cost.shape[0]
    columns = np.zeros((F, LISTED), np.int32)
    values = np.zeros((F, LISTED), np.float32)
    listed = np.zeros(F, np.int64)
    outside = np.full(F, np.float32(np.inf))
    lanes = np.empty(offer.shape[0] // DEPTH, np.float32)
    across, room = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    owner = np.empty(F, np.int64)
    bids = 0
    while True:
        owner[:] = -1
        next_row, i = 0, 0
        while next_row < F:
            best, second, j = _two_best(columns[i], values[i], listed[i], price)
            if second < outside[i]:
                _offer(cost[i], price, offer)
                _lane_maxima(offer, lanes)
                _across_blocks(lanes, across)
                bound = _rank(across, min(WANTED, F) - 1, room)
                listed[i], outside[i] = _collect(cost[i], offer, lanes, bound, columns[i], values[i])
                best, second, j = _two_best(columns[i], values[i], listed[i], price)
            bids += 1
            if bids > limit:
                return bids
            price[j] += best - second + eps
            displaced = owner[j]
            owner[j] = i
            if displaced < 0:
                next_row += 1
                i = next_row
            else:
                i = displaced
        if eps <= last:
            break
        eps = max(eps / shrink, last)
    for j in range(F):
        order[owner[j]] = j
    return bids
