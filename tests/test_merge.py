"""Merging: identical experts merge into themselves, weights add up, order of units does not matter after alignment."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepress.align import ALIGNMENTS, SOLVERS, align_group
from moepress.merge import MERGES, Evidence, merge_layer, router_rows
from moepress.merge.repair import statistics
from moepress.models.inputs import ExpertInputs
from moepress.models.layer import ExpertBank, RouterView, permute_units
from moepress.plan import Group, LayerPlan

from .test_align import bank

SCIPY, MATCHING = SOLVERS.create("scipy"), ALIGNMENTS.create("weight-matching")


def one_group(experts: int, usage: list[float], operator: str, leader: int = 0) -> LayerPlan:
    members = (leader, *(e for e in range(experts) if e != leader))
    weights = MERGES.create(operator).weights([usage[e] for e in members])
    group = Group(leader=leader, members=members, weights=tuple(weights))
    return LayerPlan(name="layer", experts=experts, router="redirect", groups=(group,))


def evidence(made: ExpertBank, fisher: ExpertBank | None = None, tokens: int = 64) -> Evidence:
    """The same random tokens for every group, and random Fisher information unless it is given."""
    draw = torch.Generator().manual_seed(1)
    x_ND = torch.randn(tokens, made.up_EFD.shape[2], generator=draw, dtype=made.up_EFD.dtype)
    inputs = {leader: ExpertInputs(x_ND, made.activation) for leader in range(made.num_experts)}
    return Evidence(inputs, fisher or made.map(lambda _, t: torch.rand(t.shape, generator=draw, dtype=t.dtype)))


def merged_bank(made: ExpertBank, plan: LayerPlan, operator: str, fisher: ExpertBank | None = None) -> ExpertBank:
    merge = MERGES.create(operator)
    alignment = MATCHING if merge.aligns else ALIGNMENTS.create("none")
    return merge_layer(made, plan, merge, alignment, SCIPY, evidence=evidence(made, fisher)).bank


def stack(experts: list[dict[str, torch.Tensor]], like: ExpertBank) -> ExpertBank:
    return like.map(lambda name, _: torch.stack([expert[name] for expert in experts]))


@pytest.mark.parametrize("operator", MERGES.names())
@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=5), st.booleans(), st.booleans(), st.integers(0, 1000))
def test_identical_experts_merge_into_themselves_in_any_unit_order(operator, usage, gated, bias, seed):
    one = bank(1, gated=gated, bias=bias, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    copies = [permute_units(one.expert(0), torch.randperm(one.hidden_units, generator=draw)) for _ in usage]
    copies[0] = one.expert(0)
    merged = merged_bank(stack(copies, one), one_group(len(usage), usage, operator), operator)
    x_TD = evidence(one).inputs[0].x_ND
    assert torch.allclose(merged.output(0, x_TD), one.output(0, x_TD), atol=1e-9)
    if operator != "zipit":  # which may join units that are never active
        for name, tensor in one.tensors().items():
            assert torch.allclose(merged.tensors()[name], tensor, atol=1e-9)


@pytest.mark.parametrize("operator", MERGES.names())
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_merging_does_not_depend_on_the_unit_order_of_the_members(operator, seed):
    made = bank(3, units=7, seed=seed)
    fisher = made.map(lambda _, t: torch.rand_like(t))
    plan = one_group(3, [3.0, 2.0, 1.0], operator)
    orders = [torch.arange(7), torch.randperm(7), torch.randperm(7)]
    shuffled = [
        stack([permute_units(source.expert(e), order) for e, order in enumerate(orders)], source)
        for source in (made, fisher)
    ]
    x_TD = torch.randn(20, 5, dtype=torch.float64)
    outputs = [merged_bank(b, plan, operator, f).output(0, x_TD) for b, f in ((made, fisher), shuffled)]
    assert torch.allclose(*outputs, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 5), st.booleans(), st.booleans(), st.integers(0, 1000))
def test_zipit_of_duplicated_units_is_exact(members, gated, bias, seed):
    """Members that hold the same units in different multiplicity: the sum of what merged units write is exact, their
    average is not (an error of the reference code)."""
    distinct = bank(1, units=4, gated=gated, bias=bias, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    experts = []
    for _ in range(members):
        # Each of the four units at least once, two of them twice, and other columns for each member.
        repeated = torch.cat([torch.randperm(4, generator=draw), torch.randint(4, (2,), generator=draw)])
        expert = permute_units(distinct.expert(0), repeated)
        expert["down_EDF"] = torch.randn(5, 6, generator=draw, dtype=torch.float64)
        experts.append(expert)
    made = stack(experts, distinct)
    usage = [float(e + 1) for e in range(members)]
    weighted = MERGES.create("zipit", weighted="frequency")
    members_ = tuple(range(members))
    group = Group(leader=0, members=members_, weights=tuple(weighted.weights(usage)))
    plan = LayerPlan(name="layer", experts=members, router="redirect", groups=(group,))
    merged = merge_layer(made, plan, weighted, ALIGNMENTS.create("none"), SCIPY, evidence=evidence(made)).bank
    x_TD = evidence(made).inputs[0].x_ND
    wanted = sum(w * made.output(e, x_TD) for e, w in enumerate(group.weights))
    assert torch.allclose(merged.output(0, x_TD), wanted, atol=1e-5)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_repair_restores_mean_and_deviation(gated, bias):
    made = bank(3, units=12, gated=gated, bias=bias)
    plan = one_group(3, [1.0, 1.0, 1.0], "repair")
    merged = merged_bank(made, plan, "repair").expert(0)
    inputs = evidence(made).inputs[0]
    plain = merged_bank(made, plan, "uniform").expert(0)
    aligned = align_group(MATCHING, SCIPY, made.expert(0), [made.expert(1), made.expert(2)]).experts
    members = [made.expert(0), *aligned]

    def wanted(look):
        return [sum(column) / 3 for column in zip(*(statistics(look(expert)) for expert in members), strict=True)]

    for part in inputs.preactivations(merged):
        look = lambda expert, part=part: inputs.preactivations(expert)[part]  # noqa: E731
        mean_F, deviation_F = statistics(look(merged))
        assert torch.allclose(deviation_F, wanted(look)[1], rtol=1e-6)
        assert not torch.allclose(statistics(look(plain))[1], wanted(look)[1], rtol=1e-2)
        assert not bias or torch.allclose(mean_F, wanted(look)[0], atol=1e-6)
    # What leaves the activation is repaired in down: with the scale and shift that down applies, it has the members'
    # statistics.
    hidden_NF = inputs.hidden(merged)
    average = merge_layer(made, plan, MERGES.create("uniform"), MATCHING, SCIPY).bank.expert(0)
    scale_F = (merged["down_EDF"] / average["down_EDF"]).mean(0)
    assert torch.allclose(merged["down_EDF"], average["down_EDF"] * scale_F)
    mean_F, deviation_F = wanted(inputs.hidden)
    assert torch.allclose(statistics(hidden_NF * scale_F)[1], deviation_F, rtol=1e-6)
    if bias:
        output_ND = hidden_NF @ merged["down_EDF"].T + merged["down_bias_ED"]
        exact_D = average["down_EDF"] @ mean_F + average["down_bias_ED"]
        assert torch.allclose(output_ND.mean(0), exact_D, atol=1e-6)


def test_repair_leaves_units_alone_that_do_not_vary():
    made = bank(2, units=4, gated=False, bias=True)
    made.up_EFD[0, 0] = 1.0
    made.up_EFD[1, 0] = -1.0  # their average reads nothing
    merge = MERGES.create("repair")
    nothing = ALIGNMENTS.create("none")
    merged = merge_layer(made, one_group(2, [1, 1], "repair"), merge, nothing, SCIPY, evidence=evidence(made)).bank
    assert all(torch.isfinite(tensor).all() for tensor in merged.tensors().values())


@pytest.mark.parametrize("weighted", ["uniform", "frequency"])
def test_fisher_of_equal_information_is_the_average(weighted):
    made = bank(3, bias=True)
    merge = MERGES.create("fisher", weighted=weighted)
    plan = one_group(3, [3.0, 2.0, 1.0], weighted)
    expected = merge_layer(made, plan, MERGES.create(weighted), MATCHING, SCIPY).bank
    for information in (0.0, 1e-20, 7.0):
        fisher = made.map(lambda _, t, information=information: torch.full_like(t, information))
        merged = merge_layer(made, plan, merge, MATCHING, SCIPY, evidence=Evidence(fisher=fisher)).bank
        for name, tensor in merged.tensors().items():
            assert torch.allclose(tensor, expected.tensors()[name], atol=1e-9)


def test_fisher_follows_who_knows():
    made = bank(2)
    fisher = made.map(lambda _, t: torch.stack([torch.full_like(t[0], 1e-4), torch.full_like(t[1], 3e-4)]))
    plan, nothing = one_group(2, [1, 1], "fisher"), ALIGNMENTS.create("none")
    merged = merge_layer(made, plan, MERGES.create("fisher"), nothing, SCIPY, evidence=Evidence(fisher=fisher)).bank
    assert torch.allclose(merged.up_EFD[0], 0.25 * made.up_EFD[0] + 0.75 * made.up_EFD[1], atol=1e-5)


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


def test_merging_in_the_shared_subspace_is_the_frequency_average():
    """Sub-MoE: one decomposition of all weights side by side, right factors averaged, times the shared left factor."""
    made = bank(3, bias=False)
    merged = merge_layer(
        made, one_group(3, [5, 3, 2], "frequency"), MERGES.create("frequency"), ALIGNMENTS.create("none"), SCIPY
    )
    for name, weight_EXY in made.tensors().items():
        left, values, right = torch.linalg.svd(torch.cat(list(weight_EXY), dim=1), full_matrices=False)
        parts = right.split(weight_EXY.shape[2], dim=1)
        averaged = sum(share * part for share, part in zip((0.5, 0.3, 0.2), parts, strict=True))
        assert torch.allclose(merged.bank.tensors()[name][0], left @ torch.diag(values) @ averaged)


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
