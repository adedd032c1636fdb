"""Alignment undoes permutations, never changes what an expert computes, and proves how good it is."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepress.align import ALIGNMENTS, SOLVERS, Pair, align_bank, align_group, match
from moepress.align.activation_matching import standardised
from moepress.align.solvers import certified_gap
from moepress.models.inputs import ExpertInputs
from moepress.models.layer import UNIT_AXIS, ExpertBank, permute_units


def bank(
    experts: int = 3, units: int = 8, width: int = 5, gated: bool = True, bias: bool = True, seed: int = 0
) -> ExpertBank:
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    tensors = dict(up_EFD=normal(experts, units, width), down_EDF=normal(experts, width, units))
    if gated:
        tensors["gate_EFD"] = normal(experts, units, width)
    if bias:
        tensors |= dict(up_bias_EF=normal(experts, units), down_bias_ED=normal(experts, width))
        if gated:
            tensors["gate_bias_EF"] = normal(experts, units)
    act = (lambda gate, up: torch.nn.functional.silu(gate) * up) if gated else (lambda gate, up: up.relu())
    return ExpertBank(**tensors, activation=act)


shapes = st.tuples(st.integers(2, 4), st.integers(1, 9), st.integers(1, 6), st.booleans(), st.booleans())


@settings(max_examples=50, deadline=None)
@given(shapes, st.integers(0, 1000))
def test_permuting_units_changes_nothing(shape, seed):
    made = bank(*shape, seed=seed)
    x_TD = torch.randn(4, made.up_EFD.shape[2], dtype=torch.float64)
    order = torch.randperm(made.hidden_units)
    permuted = permute_units(made.expert(0), order)
    changed = made.map(lambda name, tensor: torch.stack([permuted[name], *tensor[1:]]))
    assert torch.allclose(made.output(0, x_TD), changed.output(0, x_TD), atol=1e-10)


@settings(max_examples=50, deadline=None)
@given(shapes, st.integers(0, 1000), st.sampled_from(SOLVERS.names()))
def test_alignment_finds_a_hidden_permutation(shape, seed, solver):
    # A zero or repeated unit makes the permutation ambiguous, which random normal weights do not have.
    expert = bank(*shape, seed=seed).expert(0)
    order = torch.randperm(expert["up_EFD"].shape[0], generator=torch.Generator().manual_seed(seed))
    aligned = align_group(
        ALIGNMENTS.create("weight-matching"), SOLVERS.create(solver), expert, [permute_units(expert, order)]
    )
    for name, tensor in expert.items():
        assert torch.equal(aligned.experts[0][name], tensor)
    assert max(aligned.gaps) <= 1e-4


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(0, 1000), st.sampled_from(SOLVERS.names()))
def test_solvers_reach_the_best_total(units, seed, solver):
    cost = torch.randn(units, units, generator=torch.Generator().manual_seed(seed))
    solution = SOLVERS.create(solver).solve(cost)
    rows = torch.arange(units)
    assert sorted(solution.order.tolist()) == rows.tolist()
    best = max(cost[rows, list(p)].double().sum().item() for p in itertools.permutations(range(units)))
    reached = cost[rows, solution.order].double().sum().item()
    assert best - reached <= 1e-4 * max(abs(reached), 1e-9) + 1e-6


def test_certificate_never_promises_too_much():
    cost = torch.tensor([[3.0, 1.0], [2.0, 0.0]])
    assert certified_gap(cost, torch.tensor([0, 1]), torch.tensor([1.0, 0.0])) >= 0
    poor = certified_gap(cost + torch.eye(2), torch.tensor([1, 0]), torch.zeros(2))
    assert poor >= (5 - 3) / 3  # best total is 5, reached is 3


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(0, 1000))
def test_activations_find_a_hidden_permutation_whatever_the_scale_of_the_units(shape, seed):
    made = bank(*shape, seed=seed)
    expert, draw = made.expert(0), torch.Generator().manual_seed(seed)
    order = torch.randperm(made.hidden_units, generator=draw)
    other = permute_units(expert, order)
    other["down_EDF"] = torch.randn(other["down_EDF"].shape, generator=draw, dtype=torch.float64)
    x_ND = torch.randn(200, made.up_EFD.shape[2], generator=draw, dtype=torch.float64)
    inputs = ExpertInputs(x_ND, made.activation)
    pair = Pair(expert, other, inputs)
    (solution,) = match(ALIGNMENTS.create("activation-matching"), SOLVERS.create("scipy"), [pair]) or []
    found = permute_units(other, solution.order)
    # Up to their scale: units that are multiples of each other can stand for each other.
    assert torch.allclose(standardised(inputs.hidden(found)), standardised(inputs.hidden(expert)), atol=1e-9)


def test_activations_and_weights_count_the_same():
    made = bank(experts=2, units=6)
    x_ND = torch.randn(200, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = ExpertInputs(x_ND, made.activation)
    one, other = (ALIGNMENTS.create("activation-weight-matching").units(made.expert(e), inputs) for e in (0, 1))
    gain_FF = sum(a.double() @ b.double().T for a, b in zip(one, other, strict=True))
    hidden = torch.corrcoef(torch.cat([inputs.hidden(made.expert(e)).T for e in (0, 1)]))[:6, 6:]
    flat = [
        torch.cat([t.movedim(UNIT_AXIS[n], 0).reshape(6, -1) for n, t in made.expert(e).items() if n in UNIT_AXIS], 1)
        for e in (0, 1)
    ]
    cosine = torch.nn.functional.cosine_similarity(flat[0][:, None], flat[1][None], dim=-1)
    assert torch.allclose(gain_FF, hidden + cosine, atol=1e-5)


def test_align_bank_keeps_functions_and_the_original():
    original = bank()
    before = {name: tensor.clone() for name, tensor in original.tensors().items()}
    aligned, _ = align_bank(ALIGNMENTS.create("weight-matching"), SOLVERS.create("scipy"), original)
    x_TD = torch.randn(6, 5, dtype=torch.float64)
    for e in range(3):
        assert torch.allclose(original.output(e, x_TD), aligned.output(e, x_TD), atol=1e-12)
    assert all(torch.equal(before[name], tensor) for name, tensor in original.tensors().items())
    assert not all(torch.equal(before[name], tensor) for name, tensor in aligned.tensors().items())


def test_alignment_brings_experts_closer():
    made = bank(experts=2, units=32, seed=3)
    aligned, _ = align_bank(ALIGNMENTS.create("weight-matching"), SOLVERS.create("scipy"), made)
    distance = lambda b: sum(float((t[0] - t[1]).square().sum()) for t in b.tensors().values())  # noqa: E731
    assert distance(aligned) < 0.9 * distance(made)


@pytest.mark.parametrize("name", ALIGNMENTS.names())
def test_every_alignment_says_what_it_is(name):
    assert ALIGNMENTS.get(name).__doc__
