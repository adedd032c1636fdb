"""The auction on a CPU, compiled by numba. Every function releases the GIL: problems run side by side in threads.

A bid needs the best and the second best column of one row at the current prices. Reading the whole row for that would
make the memory the limit, so each row remembers a short list of its best columns and a bound that no other column
exceeded when the list was made. Prices only ever rise: as long as the second best of the list is above that bound, the
list decides the bid, and the row is not read. One bid in six reads a row.

Whole rows are read as blocks of `DEPTH` × `LANES` columns, and maxima are taken lane by lane: that becomes vector
instructions, which a running maximum over the row does not. Lanes jump through memory, so a row is first run over from
end to end, to see that it is finite: that costs little, and brings it into the cache at the speed of the memory.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from moepress.align.solvers.base import in_threads, not_finite, relative_gap

LANES, DEPTH = 64, 16
BLOCK = LANES * DEPTH
LISTED = 32
"""Columns that a row remembers at the most: 8 bytes each, so that the lists of 3072 rows fit into a 1 MB cache."""
WANTED = 16
"""Columns that a list gets at the least. More would ask for more than `LISTED` too often."""
FINITE_BITS, EXPONENT = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
compiled = njit(nogil=True, cache=True)
# NaN never comes this far, and the sign of zero does not matter: without these two, no maximum is a vector instruction.
compiled_for_vectors = njit(nogil=True, cache=True, fastmath={"nnan", "nsz"})


def prove(costs_NFF: Tensor, which: list[int], prices_nF: Tensor | None) -> tuple[Tensor, Tensor]:
    """The column of each row's maximum at these prices, and whether all of them differ: then no assignment is
    better. Refuses costs that are not finite where it sees them: it stops when a column comes a second time."""
    F = costs_NFF.shape[1]
    order_nF = torch.zeros(len(which), F, dtype=torch.int64)

    def one(place: int) -> bool:
        cost = costs_NFF[which[place]].numpy()
        price = np.zeros(F, np.float32) if prices_nF is None else prices_nF[place].numpy()
        seen = _distinct_maxima(cost, cost.view(np.int32), price, order_nF[place].numpy())
        if seen < 0:
            raise not_finite()
        return bool(seen == F)

    return order_nF, torch.tensor(in_threads(one, range(len(which))))


def bid(
    costs_NFF: Tensor, which: list[int], first_n: Tensor, last_n: Tensor, shrink: float, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Auctions with epsilon from `first` to `last`: orders, prices, bids made, and whether all rows got a column
    within the limit of bids. Refuses costs that are not finite."""
    F = costs_NFF.shape[1]
    order_nF = torch.zeros(len(which), F, dtype=torch.int64)
    prices_nF = torch.zeros(len(which), F)

    def one(place: int) -> int:
        cost, price, order = (t.numpy() for t in (costs_NFF[which[place]], prices_nF[place], order_nF[place]))
        eps = np.float32(first_n[place].item()), np.float32(last_n[place].item()), np.float32(shrink)
        bids = int(_auction(cost, cost.view(np.int32), *eps, limit, price, order))
        if bids < 0:
            raise not_finite()
        return bids

    bids_n = torch.tensor(in_threads(one, range(len(which))), dtype=torch.int64)
    return order_nF, prices_nF, bids_n.clamp_max(limit), bids_n <= limit


def certify(costs_NFF: Tensor, which: list[int], order_nF: Tensor, prices_nF: Tensor) -> Tensor:
    """The certified gap of each assignment, in float64 from the costs and prices alone (see `certified_gap`)."""

    def one(place: int) -> tuple[float, float]:
        cost, price, order = (t.numpy() for t in (costs_NFF[which[place]], prices_nF[place], order_nF[place]))
        return _missed(cost, cost.view(np.int32), price, order)

    sums = torch.tensor(in_threads(one, range(len(which))), dtype=torch.float64).reshape(-1, 2)
    return relative_gap(sums[:, 0], sums[:, 1])


@compiled
def _finite(bits):  # type: ignore[no-untyped-def]
    """Of float32 numbers by their bits: comparing integers becomes vector instructions, `isfinite` does not."""
    largest = np.int32(0)
    for k in range(bits.shape[0]):
        largest = max(largest, bits[k] & FINITE_BITS)
    return largest < EXPONENT


@compiled_for_vectors
def _lane_maxima(cost_F, price_F, rest, lanes):  # type: ignore[no-untyped-def]
    """The best offer (cost − price) of each lane of each block: `lanes` has `LANES` entries a block. `rest` is room
    for the last, incomplete block."""
    whole = cost_F.shape[0] // BLOCK
    for block in range(whole):
        # Unsigned: an index that could be negative keeps the loops from becoming vector instructions.
        start, place = np.uint64(block * BLOCK), np.uint64(block * LANES)
        for lane in range(np.uint64(LANES)):
            best = cost_F[start + lane] - price_F[start + lane]
            for depth in range(np.uint64(1), np.uint64(DEPTH)):
                j = start + depth * np.uint64(LANES) + lane
                offer = cost_F[j] - price_F[j]
                if offer > best:
                    best = offer
            lanes[place + lane] = best
    left = cost_F.shape[0] - whole * BLOCK
    if left == 0:
        return
    cost_tail, price_tail = cost_F[whole * BLOCK :], price_F[whole * BLOCK :]
    for k in range(left):
        rest[k] = cost_tail[k] - price_tail[k]
    rest[left:] = -np.inf
    for lane in range(np.uint64(LANES)):
        best = rest[lane]
        for depth in range(np.uint64(1), np.uint64(DEPTH)):
            offer = rest[depth * np.uint64(LANES) + lane]
            if offer > best:
                best = offer
        lanes[np.uint64(whole * LANES) + lane] = best


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
def _rooms(columns, of):  # type: ignore[no-untyped-def]
    """Room for the lanes of a row, and for its last block, in the type of `of`."""
    return np.empty(-(-columns // BLOCK) * LANES, of.dtype), np.empty(BLOCK, of.dtype)


@compiled
def _column_of(cost_F, price_F, lanes, value):  # type: ignore[no-untyped-def]
    for k in range(lanes.shape[0]):
        if lanes[k] == value:
            j = (k // LANES) * BLOCK + k % LANES
            while cost_F[j] - price_F[j] != value:
                j += LANES
            return j
    return 0


@compiled
def _distinct_maxima(cost, bits, price, order):  # type: ignore[no-untyped-def]
    """Fill `order` until a column comes a second time. The rows seen (all of them: proven), −1: not finite."""
    F = cost.shape[0]
    taken = np.zeros(F, np.bool_)
    lanes, rest = _rooms(F, price)
    for i in range(F):
        if not _finite(bits[i]):
            return -1
        _lane_maxima(cost[i], price, rest, lanes)
        j = _column_of(cost[i], price, lanes, _maximum(lanes))
        if taken[j]:
            return i
        taken[j] = True
        order[i] = j
    return F


@compiled
def _missed(cost, bits, price, order):  # type: ignore[no-untyped-def]
    """What the rows miss of their maxima at these prices, and what the assignment reaches."""
    missed, reached = 0.0, 0.0
    exact = price.astype(np.float64)
    lanes, rest = _rooms(cost.shape[0], exact)
    across = np.empty(LANES, np.float64)
    for i in range(cost.shape[0]):
        _finite(bits[i])
        _lane_maxima(cost[i], exact, rest, lanes)
        _across_blocks(lanes, across)
        own = np.float64(cost[i, order[i]])
        missed += _maximum(across) - (own - exact[order[i]])
        reached += own
    return missed, reached


@compiled_for_vectors
def _lanes_from(across, bound):  # type: ignore[no-untyped-def]
    count = 0
    for lane in range(across.shape[0]):
        count += across[lane] >= bound
    return count


@compiled
def _bound(across):  # type: ignore[no-untyped-def]
    """A number that at least `WANTED` lanes reach, and not many more where they differ (by bisection: no branch of it
    has to be guessed, as sorting would make the processor do)."""
    low, high = across[0], across[0]
    for lane in range(1, across.shape[0]):
        low, high = min(low, across[lane]), max(high, across[lane])
    for _ in range(12):
        middle = np.float32(0.5) * (low + high)
        lanes = _lanes_from(across, middle)
        if lanes < WANTED:
            high = middle
        else:
            low = middle
            if lanes <= WANTED + 4:
                break
    return low


@compiled
def _collect(cost_F, price_F, lanes, bound, found, room, columns, values):  # type: ignore[no-untyped-def]
    """List the columns that offer `bound` or more: how many, and what no other column exceeds. Counting goes on
    where it does not hit, so that there is no branch to guess."""
    hits = 0
    for k in range(lanes.shape[0]):
        found[hits] = k
        hits += lanes[k] >= bound
    listed = 0
    for hit in range(hits):
        k = found[hit]
        j = (k // LANES) * BLOCK + k % LANES
        if listed > columns.shape[0]:
            break
        for _ in range(min(DEPTH, (cost_F.shape[0] - j + LANES - 1) // LANES)):
            room[listed] = j
            listed += cost_F[j] - price_F[j] >= bound
            j += LANES
    if listed > columns.shape[0]:
        return _collect_best(cost_F, price_F, lanes, bound, columns, values)
    for place in range(listed):
        columns[place], values[place] = room[place], cost_F[room[place]]
    return listed, bound


@compiled
def _collect_best(cost_F, price_F, lanes, bound, columns, values):  # type: ignore[no-untyped-def]
    """The same where there may be more such columns than the list takes: the best of them stay."""
    listed, outside = 0, bound
    for k in range(lanes.shape[0]):
        if lanes[k] < bound:
            continue
        for j in range((k // LANES) * BLOCK + k % LANES, min(cost_F.shape[0], (k // LANES + 1) * BLOCK), LANES):
            offer = cost_F[j] - price_F[j]
            if listed < columns.shape[0]:
                if offer >= bound:
                    columns[listed], values[listed] = j, cost_F[j]
                    listed += 1
            elif offer > outside:
                place = _least(columns, values, price_F)
                least = values[place] - price_F[columns[place]]
                if offer > least:
                    columns[place], values[place] = j, cost_F[j]
                outside = max(outside, min(offer, least))
    return listed, outside


@compiled
def _least(columns, values, price_F):  # type: ignore[no-untyped-def]
    least = 0
    for place in range(1, columns.shape[0]):
        if values[place] - price_F[columns[place]] < values[least] - price_F[columns[least]]:
            least = place
    return least


@compiled_for_vectors
def _two_best(columns, values, listed, price_F):  # type: ignore[no-untyped-def]
    best, second, column = np.float32(-np.inf), np.float32(-np.inf), 0
    for place in range(listed):
        j = columns[place]
        offer = values[place] - price_F[j]
        if offer > second:
            if offer > best:
                best, second, column = offer, best, j
            else:
                second = offer
    return best, second, column


@compiled
def _auction(cost, bits, eps, last, shrink, limit, price, order):  # type: ignore[no-untyped-def]
    """Gauss–Seidel auction with epsilon scaling: a row bids, the row that it displaces bids next. Returns the bids
    made; more than `limit`: it gave up; −1: not finite."""
    F = cost.shape[0]
    columns = np.zeros((F, LISTED), np.int32)
    values = np.zeros((F, LISTED), np.float32)
    listed = np.zeros(F, np.int64)
    outside = np.full(F, np.float32(np.inf))
    lanes, rest = _rooms(F, price)
    across, found = np.empty(LANES, np.float32), np.empty(lanes.shape[0] + 1, np.int64)
    room = np.empty(LISTED + DEPTH + 1, np.int64)
    owner = np.empty(F, np.int64)
    bids = 0
    while True:
        owner[:] = -1
        next_row, i = 0, 0
        while next_row < F:
            best, second, j = _two_best(columns[i], values[i], listed[i], price)
            if second < outside[i]:
                if not _finite(bits[i]):
                    return -1
                _lane_maxima(cost[i], price, rest, lanes)
                _across_blocks(lanes, across)
                # Up to `LANES` columns, each is a lane of its own, and lanes without a column do not count.
                bound = _bound(across[: min(LANES, F)])
                listed[i], outside[i] = _collect(cost[i], price, lanes, bound, found, room, columns[i], values[i])
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
