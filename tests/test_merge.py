"""Merging: identical experts merge into themselves, weights add up, order of units does not matter after alignment."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepress.align import ALIGNMENTS, SOLVERS
from moepress.merge import MERGES, merge_layer, router_rows
from moepress.models.layer import RouterView, permute_units
from moepress.plan import Group, LayerPlan

from .test_align import bank

SCIPY, MATCHING = SOLVERS.create("scipy"), ALIGNMENTS.create("weight-matching")


def one_group(experts: int, usage: list[float], operator: str, leader: int = 0) -> LayerPlan:
    members = (leader, *(e for e in range(experts) if e != leader))
    weights = MERGES.create(operator).weights([usage[e] for e in members])
    group = Group(leader=leader, members=members, weights=tuple(weights))
    return LayerPlan(name="layer", experts=experts, router="redirect", groups=(group,))


@pytest.mark.parametrize("operator", MERGES.names())
@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=5), st.booleans(), st.integers(0, 1000))
def test_identical_experts_merge_into_themselves_in_any_unit_order(operator, usage, gated, seed):
    one = bank(1, gated=gated, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    copies = [permute_units(one.expert(0), torch.randperm(one.hidden_units, generator=draw)) for _ in usage]
    copies[0] = one.expert(0)
    many = one.map(lambda name, _: torch.stack([copy[name] for copy in copies]))
    merged = merge_layer(many, one_group(len(usage), usage, operator), MERGES.create(operator), MATCHING, SCIPY)
    for name, tensor in one.tensors().items():
        assert torch.allclose(merged.bank.tensors()[name], tensor, atol=1e-12)


@pytest.mark.parametrize("operator", MERGES.names())
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_merging_does_not_depend_on_the_unit_order_of_the_members(operator, seed):
    made = bank(3, units=7, seed=seed)
    plan = one_group(3, [3.0, 2.0, 1.0], operator)
    shuffled = [made.expert(0)] + [permute_units(made.expert(e), torch.randperm(7)) for e in (1, 2)]
    other = made.map(lambda name, _: torch.stack([expert[name] for expert in shuffled]))
    first = merge_layer(made, plan, MERGES.create(operator), MATCHING, SCIPY).bank
    second = merge_layer(other, plan, MERGES.create(operator), MATCHING, SCIPY).bank
    for name, tensor in first.tensors().items():
        assert torch.allclose(tensor, second.tensors()[name], atol=1e-9)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.sampled_from(MERGES.names()))
def test_weights_add_up_and_never_vanish(usage, operator):
    weights = MERGES.create(operator).weights(usage)
    assert abs(sum(weights) - 1) < 1e-9 and min(weights) >= 0


def test_unused_group_is_averaged_not_zeroed():
    made = bank(2)
    merged = merge_layer(made, one_group(2, [0.0, 0.0], "frequency"), MERGES.create("frequency"), MATCHING, SCIPY)
    assert merged.bank.up_EFD.abs().max() > 0.1
    assert MERGES.create("frequency").weights([0.0, 0.0]) == [0.5, 0.5]


def test_frequency_weights_count():
    made = bank(2, bias=False)
    merged = merge_layer(
        made, one_group(2, [3, 1], "frequency"), MERGES.create("frequency"), ALIGNMENTS.create("none"), SCIPY
    )
    assert torch.allclose(merged.bank.up_EFD[0], 0.75 * made.up_EFD[0] + 0.25 * made.up_EFD[1])


def test_low_precision_is_summed_in_float32():
    made = bank(4, units=16).map(lambda _, t: t.bfloat16())
    plan = one_group(4, [1.0, 1.0, 1.0, 1.0], "uniform")
    merged = merge_layer(made, plan, MERGES.create("uniform"), ALIGNMENTS.create("none"), SCIPY).bank
    assert merged.up_EFD.dtype == torch.bfloat16
    assert torch.equal(merged.up_EFD[0], made.up_EFD.float().mean(0).bfloat16())


def test_router_rows_keep_mean_and_fixed():
    weight = torch.arange(10.0).reshape(5, 2)
    view = RouterView(weight, {"gate.weight": weight, "gate.bias": torch.arange(5.0)[None]}, 1, "test", fixed_experts=1)
    groups = (Group(leader=2, members=(2, 0), weights=(0.5, 0.5)), Group(leader=3, members=(3, 1), weights=(0.9, 0.1)))
    plan = LayerPlan(name="a", experts=4, router="keep", groups=groups)
    kept = router_rows(view, plan)
    assert kept["gate.weight"].tolist() == [[4, 5], [6, 7], [8, 9]] and kept["gate.bias"].tolist() == [[2, 3, 4]]
    mean = router_rows(view, plan.model_copy(update={"router": "mean"}))
    assert mean["gate.weight"].tolist() == [[2, 3], [4, 5], [8, 9]] and mean["gate.bias"].tolist() == [[1, 2, 4]]
