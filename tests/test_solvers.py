"""Every solver reaches SciPy's total within the gap that it certifies, whatever the costs look like."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moepress.align import ALIGNMENTS, SOLVERS, Pair, align_bank, kinds, match
from moepress.align.costs import fill_costs, squared_norms
from moepress.align.solvers import Solution, Solver, auction, auction_cpu, certified_gap
from moepress.align.solvers.auction import epsilons
from moepress.errors import MoepressError
from moepress.merge import MERGES, merge_layer

from .test_align import bank
from .test_merge import one_group

F = 96
"""More than `auto` leaves to SciPy, and no multiple of what the compiled code works in."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(3))


def with_dead_units(units: Tensor, share: float) -> Tensor:
    dead = torch.rand(len(units), generator=torch.Generator().manual_seed(4)) < share
    return units.masked_fill(dead[:, None], 0)


A, B = normal(F, 16, seed=1), normal(F, 16, seed=2)
COUNT = torch.arange(float(F))
UNUSUAL = {
    "all zero": torch.zeros(F, F),
    "all the same": torch.full((F, F), 2.5),
    "rank 1": A[:, :1] @ B[:, :1].T,
    "rank 2": A[:, :2] @ B[:, :2].T,
    "product of ranks": torch.outer(COUNT, COUNT),
    "against each other": -torch.outer(COUNT, COUNT),
    "duplicate units": A[integers(0, F // 4, F)] @ B[integers(0, F // 4, F)].T,
    "a third dead units": with_dead_units(A, 0.3) @ with_dead_units(B, 0.3).T,
    "nearly all units dead": with_dead_units(A, 0.95) @ with_dead_units(B, 0.95).T,
    "few integers": integers(-2, 3, F, F).float(),
    "integers": integers(-1000, 1000, F, F),
    "large offset": A @ B.T + 1e6,
    "large offset in float64": (A @ B.T).double() + 1e9,
    "tiny": 1e-12 * (A @ B.T),
    "huge": 1e30 * (A @ B.T),
    "bfloat16": (A @ B.T).bfloat16(),
    "float16": (A @ B.T).half(),
    "norms of all sizes": (A * (2 * normal(F, 1)).exp()) @ (B * (2 * normal(F, 1, seed=5)).exp()).T,
    "one row dwarfs all": torch.cat([1e6 * normal(1, F), normal(F - 1, F)]),
    "one column dwarfs all": torch.cat([torch.full((F, 1), 1e6), normal(F, F - 1)], dim=1),
    "all negative": -normal(F, F).abs(),
    "one unit": torch.tensor([[-3.0]]),
    "two units": torch.tensor([[1.0, 2.0], [1.0, 2.0]]),
    "a view": (A @ B.T).T[:, :],
}


def total(cost_FF: Tensor, order_F: Tensor) -> float:
    return float(cost_FF.double()[torch.arange(len(order_F)), order_F].sum())


def best_total(cost_FF: Tensor) -> float:
    return float(cost_FF.double().numpy()[linear_sum_assignment(cost_FF.double().numpy(), maximize=True)].sum())


def assert_as_good_as_certified(cost_FF: Tensor, solution: Solution, within: float = 1e-4) -> None:
    size = cost_FF.shape[0]
    assert solution.order.dtype == torch.int64
    assert sorted(solution.order.tolist()) == list(range(size))
    best, reached = best_total(cost_FF), total(cost_FF, solution.order)
    rounding = 1e-12 * size * float(cost_FF.double().abs().max())
    assert best - reached <= solution.gap * abs(reached) + rounding
    assert 0 <= solution.gap <= within


@pytest.mark.parametrize("solver", SOLVERS.names())
@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_costs(solver: str, case: str) -> None:
    cost_FF = UNUSUAL[case]
    before = cost_FF.clone()
    assert_as_good_as_certified(cost_FF, SOLVERS.create(solver).solve(cost_FF))
    assert torch.equal(cost_FF, before), "a solver must leave its input alone"


@pytest.mark.parametrize("solver", SOLVERS.names())
@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 130),
    width=st.integers(1, 40),
    spread=st.sampled_from([0.0, 0.3, 1.0]),
    noise=st.sampled_from([0.3, 1.0, 3.0, None]),
    seed=st.integers(0, 10_000),
)
def test_experts_of_all_kinds(
    solver: str, size: int, width: int, spread: float, noise: float | None, seed: int
) -> None:
    scale = (spread * normal(size, 1, seed=seed)).exp()
    base, own = scale * normal(size, width, seed=seed + 1), normal(size, width, seed=seed + 2)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    other = scale * own if noise is None else (base + noise * own)[order]
    solution = SOLVERS.create(solver).solve(base @ other.T, other.square().sum(dim=1))
    assert_as_good_as_certified(base @ other.T, solution)


@pytest.mark.parametrize("solver", SOLVERS.names())
def test_together_as_alone(solver: str) -> None:
    costs_NFF = torch.stack([normal(F, F, seed=seed) + (seed % 2) * 9 * torch.eye(F) for seed in range(5)])
    made = SOLVERS.create(solver)
    together = made.solve_many(costs_NFF)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        side_by_side = made.solve_many(costs_NFF)
    finally:
        torch.set_num_threads(threads)
    for cost_FF, one, other in zip(costs_NFF, together, side_by_side, strict=True):
        alone = made.solve(cost_FF)
        assert torch.equal(one.order, alone.order) and torch.equal(other.order, alone.order)
        assert (one.gap, one.kind, one.bids) == (alone.gap, alone.kind, alone.bids)
    assert made.solve_many(costs_NFF[:0]) == []


@pytest.mark.parametrize("solver", SOLVERS.names())
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0, 5), (2, F - 1, F - 1)])
def test_what_is_not_finite_is_refused(solver: str, value: float, place: tuple[int, int, int]) -> None:
    for start in (normal(3, F, F), torch.eye(F).repeat(3, 1, 1)):
        start[place] = value
        for costs_NFF in (start, start.double()):
            with pytest.raises(MoepressError, match="must be finite"):
                SOLVERS.create(solver).solve_many(costs_NFF)


@pytest.mark.parametrize("solver", SOLVERS.names())
@pytest.mark.parametrize("shape", [(3, 4), (0, 0)])
def test_what_is_not_square_is_refused(solver: str, shape: tuple[int, int]) -> None:
    with pytest.raises(MoepressError, match="must be square"):
        SOLVERS.create(solver).solve(torch.zeros(shape))


def test_how_it_was_solved_is_told() -> None:
    solve = SOLVERS.create("auction").solve
    random = normal(F, F)
    assert solve(random + 9 * torch.eye(F)).kind == "proof"
    assert solve(random + 9 * torch.eye(F)).gap == 0
    found = solve(random)
    assert found.kind == "auction" and found.bids >= F
    assert SOLVERS.create("auto").solve(random).kind == "auction"
    assert SOLVERS.create("auto").solve(random[:64, :64]).kind == "exact"
    exact = SOLVERS.create("auction", gap=0.0).solve(random)
    assert exact.kind == "polish" and exact.gap == 0
    assert total(random, exact.order) == pytest.approx(best_total(random), abs=1e-9)
    given_up = SOLVERS.create("auction", bids=1).solve(random)
    assert given_up.kind == "exact" and given_up.gap == 0 and given_up.bids == F
    assert kinds([found, exact, given_up]) == {"auction": 1, "polish": 1, "exact": 1}


def test_norms_prove_what_maxima_do_not() -> None:
    units = normal(F, 64) * (0.5 * normal(F, 1, seed=1)).exp()
    other = (units + 0.1 * normal(F, 64, seed=2)).flip(0)
    cost_FF, norm_F = units @ other.T, other.square().sum(dim=1)
    assert SOLVERS.create("auction").solve(cost_FF).kind == "auction"
    proven = SOLVERS.create("auction").solve(cost_FF, norm_F)
    assert proven.kind == "proof" and proven.order.tolist() == list(range(F))[::-1]


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 1100), st.integers(0, 1000))
def test_certificates_agree(size: int, seed: int) -> None:
    cost_FF, price_F = normal(size, size, seed=seed), normal(size, seed=seed + 1)
    order_F = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    for cost in (cost_FF, cost_FF.double()):
        gap = auction_cpu.certify(cost[None], [0], order_F[None], price_F[None])[0].item()
        assert gap == pytest.approx(certified_gap(cost, order_F, price_F), rel=1e-9)


@pytest.mark.parametrize("size", [700, 1100])
def test_larger_than_a_block(size: int) -> None:
    cost_FF = normal(size, 50) @ normal(size, 50, seed=1).T
    solution = SOLVERS.create("auction").solve(cost_FF)
    assert solution.kind == "auction"
    assert_as_good_as_certified(cost_FF, solution, within=1e-5)


def test_without_numba_there_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auction.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MoepressError, match="pip install numba"):
        SOLVERS.create("auction").solve(normal(F, F))


# The way from experts to problems


class Recorder(Solver):
    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def solve_many(self, costs_NFF: Tensor, norms_NF: Tensor | None = None) -> list[Solution]:
        assert norms_NF is not None
        self.shapes.append(tuple(costs_NFF.shape))
        return SOLVERS.create("scipy").solve_many(costs_NFF, norms_NF)


@pytest.mark.parametrize(
    ("memory", "threads", "together"),
    [(10**9, 4, [5]), (10**9, 1, [2, 2, 1]), (2 * 4 * 9 * 9, 4, [2, 2, 1]), (0, 4, [1] * 5)],
)
def test_no_more_costs_are_held_than_asked_for(
    memory: int, threads: int, together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    made, solver, alignment = bank(experts=6, units=9), Recorder(), ALIGNMENTS.create("weight-matching")
    aligned, solutions = align_bank(alignment, solver, made, memory=memory)
    assert [shape[0] for shape in solver.shapes] == together and len(solutions) == 5
    expected, _ = align_bank(alignment, SOLVERS.create("auction"), made)
    assert all(torch.equal(tensor, expected.tensors()[name]) for name, tensor in aligned.tensors().items())


def test_a_merged_layer_tells_how_it_was_aligned() -> None:
    made, uniform = bank(experts=4, units=80), MERGES.create("uniform")
    plan, alignment = one_group(4, [1.0] * 4, "uniform"), ALIGNMENTS.create("weight-matching")
    merged = merge_layer(made, plan, uniform, alignment, SOLVERS.create("auction"))
    assert merged.solved == {"auction": 3} and 0 < merged.gap < 1e-4
    assert merge_layer(made, plan, uniform, alignment, SOLVERS.create("scipy")).solved == {"exact": 3}
    unaligned = merge_layer(made, plan, uniform, ALIGNMENTS.create("none"), SOLVERS.create("auction"))
    assert not unaligned.solved and unaligned.gap == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [True, False])
def test_costs_are_inner_products_of_whole_units(dtype: torch.dtype, gated: bool) -> None:
    made = bank(experts=2, gated=gated).map(lambda _, tensor: tensor.to(dtype))
    alignment = ALIGNMENTS.create("weight-matching")
    first, second = (alignment.units(made.expert(e), None) for e in range(2))
    rows = [torch.cat([part.double() for part in parts], dim=1) for parts in (first, second)]
    costs_NFF = torch.full((1, 8, 8), float("nan"))
    fill_costs(costs_NFF, [(first, second)])
    torch.testing.assert_close(costs_NFF[0].double(), rows[0] @ rows[1].T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(squared_norms([second])[0].double(), rows[1].square().sum(dim=1), rtol=1e-5, atol=1e-5)


def test_rounded_operands_lose_little() -> None:
    made = bank(experts=2, units=200, width=64)
    pair = [Pair(made.expert(0), made.expert(1))]
    (exact,) = match(ALIGNMENTS.create("weight-matching"), SOLVERS.create("auction"), pair) or []
    rounded_method = ALIGNMENTS.create("weight-matching", operands="bfloat16")
    (rounded,) = match(rounded_method, SOLVERS.create("auction"), pair) or []
    costs_NFF = torch.empty(1, 200, 200)
    units = [ALIGNMENTS.create("weight-matching").units(expert, None) for expert in (pair[0].reference, pair[0].other)]
    fill_costs(costs_NFF, [(units[0], units[1])])
    lost = total(costs_NFF[0], exact.order) - total(costs_NFF[0], rounded.order)
    assert lost <= 1e-3 * total(costs_NFF[0], exact.order)


# The CUDA kernels, in Triton's interpreter: element by element in Python, so only on a few columns


@pytest.fixture
def cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    name = "moepress.align.solvers.auction_cuda"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sys.modules.pop(name, None)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


@pytest.mark.parametrize("size", [2, 5, 13])
def test_cuda_kernels_do_the_same(cuda_kernels: ModuleType, size: int) -> None:
    costs_NFF = torch.stack([normal(size, size, seed=seed) for seed in range(3)])
    costs_NFF[1] += 9 * torch.eye(size)
    which, prices_nF = [2, 0], normal(2, size)
    assert bool(cuda_kernels.prove(costs_NFF, [1], None)[1])
    for prices in (None, prices_nF):
        columns, proven = cuda_kernels.prove(costs_NFF, which, prices)
        expected = (costs_NFF[which] - (0 if prices is None else prices[:, None])).argmax(dim=2)
        assert torch.equal(columns, expected)
        assert proven.tolist() == [len(row.unique()) == size for row in expected]
    limits = epsilons(costs_NFF, which)
    order, prices_nF, bids, finished = cuda_kernels.bid(costs_NFF, which, *limits, 20.0, 1000 * size)
    gaps = cuda_kernels.certify(costs_NFF, which, order, prices_nF)
    assert finished.all() and bids.min() >= size
    for problem, order_F, price_F, gap in zip(which, order, prices_nF, gaps.tolist(), strict=True):
        assert gap == pytest.approx(certified_gap(costs_NFF[problem], order_F, price_F), rel=1e-6, abs=1e-12)
        assert_as_good_as_certified(costs_NFF[problem], Solution(order_F, gap, "auction"))
    assert not cuda_kernels.bid(costs_NFF, which, *limits, 20.0, 1)[3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_whole_way_over_cuda_kernels(
    cuda_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(auction, "backend_for", lambda device: cuda_kernels)
    units, noise = normal(3, 11, 6), normal(3, 11, 6, seed=1)
    units[2] *= (0.5 * normal(11, 1)).exp()
    others = torch.stack([noise[0], units[1] + 0.01 * noise[1], units[2] + 0.01 * noise[2]])
    costs_NFF, norms_NF = (units @ others.mT).to(dtype), others.square().sum(dim=2)
    costs_NFF[1] += 9 * torch.eye(11)
    solutions = SOLVERS.create("auction").solve_many(costs_NFF, norms_NF)
    assert [s.kind for s in solutions] == ["auction", "proof", "proof"]
    for cost_FF, solution in zip(costs_NFF, solutions, strict=True):
        assert_as_good_as_certified(cost_FF, solution)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_cuda_kernels_refuse_what_is_not_finite(cuda_kernels: ModuleType) -> None:
    for value in (float("nan"), float("inf"), float("-inf")):
        costs_NFF = normal(2, 5, 5)
        costs_NFF[1, 3, 4] = value
        with pytest.raises(MoepressError, match="must be finite"):
            cuda_kernels.prove(costs_NFF, [0, 1], None)
