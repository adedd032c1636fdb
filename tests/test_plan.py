"""Plans: every expert goes to exactly one place, totals are exact, ties are broken and never lost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepress.errors import MoepressError
from moepress.models.layer import ExpertBank, RouterView
from moepress.plan import (
    BUDGETS,
    GROUPINGS,
    GUARDS,
    SALIENCIES,
    SIMILARITIES,
    LayerFacts,
    LayerPlan,
    Limits,
    Plan,
    Planner,
)
from moepress.plan.grouping import strongest
from moepress.registry import Registry


def facts(index: int, counts: list[int], seed: int = 0, width: int = 6, groups: int = 1, top_k: int = 2) -> LayerFacts:
    """A layer with random weights and the given usage counts."""
    experts, draw = len(counts), torch.Generator().manual_seed(seed + index)
    normal = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    bank = ExpertBank(normal(experts, 4, width), normal(experts, width, 4), lambda gate, up: up.relu())
    logits_TE = normal(50, experts).double()
    router = RouterView(normal(experts, width), {}, top_k, "test", groups=groups, topk_groups=1)
    statistics = {
        "usage": {"count": torch.tensor(counts, dtype=torch.float64), "tokens": torch.tensor([2.0]).double()},
        "router-gram": {"gram": logits_TE.T @ logits_TE},
        "gradient-gram": {"gram": logits_TE[:9].T @ logits_TE[:9]},
        "features": {name: normal(experts, width).double().abs() for name in ("sum", "abs", "square")},
        "output-norm": {
            "power": torch.full((experts,), 2.0).double() ** 32,
            "gated": torch.tensor(counts, dtype=torch.float64),
            "routed": torch.tensor(counts, dtype=torch.float64),
        },
        "gated-output": {"sum": normal(experts, width).double()},
        "mean-output": {"sum": normal(experts, width).double(), "tokens": torch.tensor([2.0]).double()},
    }
    return LayerFacts(f"layers.{index}", index, lambda: bank, router, statistics, seed)


def planner(budget: str = "adaptive", similarity: str = "router-logits", router: str = "redirect", **other) -> Planner:
    return Planner(
        SALIENCIES.create("frequency"),
        SIMILARITIES.create(similarity),
        BUDGETS.create(budget),
        GROUPINGS.create("dominant"),
        router,
        lambda usage: [1 / len(usage)] * len(usage),
        **other,
    )


usages = st.integers(3, 9).flatmap(
    lambda experts: st.lists(st.lists(st.integers(0, 40), min_size=experts, max_size=experts), min_size=1, max_size=4)
)


@settings(max_examples=60, deadline=None)
@given(usages, st.data(), st.sampled_from(["adaptive", "uniform"]), st.sampled_from(SIMILARITIES.names()))
def test_every_expert_in_one_group_and_totals_exact(counts, data, budget, similarity):
    experts, layers = len(counts[0]), [facts(i, c) for i, c in enumerate(counts)]
    if budget == "uniform":
        average = float(data.draw(st.integers(1, experts)))
    else:
        average = data.draw(st.integers(len(layers), experts * len(layers))) / len(layers)
    plan = planner(budget, similarity).make(layers, set(), average)
    assert sum(layer.physical for layer in plan.layers) == round(average * len(layers))
    for layer, usage in zip(plan.layers, counts, strict=True):
        members = sorted(e for group in layer.groups for e in group.members)
        assert members == list(range(experts)) and layer.dropped == ()
        assert all(group.members[0] == group.leader for group in layer.groups)
        leaders = [group.leader for group in layer.groups]
        others = [e for e in range(experts) if e not in leaders]
        assert all(usage[leader] >= usage[other] for leader in leaders for other in others)
        assert [layer.expert_map()[leader] for leader in leaders] == list(range(len(leaders)))


@settings(max_examples=60, deadline=None)
@given(usages, st.data())
def test_adaptive_gives_each_layer_its_most_used(counts, data):
    experts = len(counts[0])
    total = data.draw(st.integers(len(counts), experts * len(counts)))
    scores = [torch.tensor(c, dtype=torch.float64) for c in counts]
    made = BUDGETS.create("adaptive").counts(scores, total / len(counts), [Limits(1, experts)] * len(counts))
    assert sum(made) == total and all(1 <= k <= experts for k in made)
    # Nothing that was left out has a larger share than something that was kept for its rank (the first is a given).
    shares = [sorted((s / s.sum().clamp_min(1e-300)).tolist(), reverse=True) for s in scores]
    kept = [share for layer, k in zip(shares, made, strict=True) for share in layer[1:k]]
    left = [share for layer, k in zip(shares, made, strict=True) for share in layer[k:]]
    assert not kept or not left or min(kept) >= max(left) - 1e-12


def test_ties_and_zeros_do_not_lose_experts():
    zero = [torch.zeros(8, dtype=torch.float64)] * 3
    assert sum(BUDGETS.create("adaptive").counts(zero, 4.0, [Limits(1, 8)] * 3)) == 12


def test_skipped_layers_stay_whole_and_out_of_the_average():
    layers = [facts(i, [9, 5, 1, 0]) for i in range(3)]
    plan = planner().make(layers, {"layers.0"}, 2.0)
    assert plan.layers[0].physical == 4
    assert sum(layer.physical for layer in plan.layers[1:]) == 4


def test_router_groups_keep_equal_counts():
    layer = facts(0, [90, 80, 70, 60, 4, 3, 2, 1], groups=2)
    plan = planner("uniform", router="keep").make([layer], set(), 4.0)
    assert [group.leader for group in plan.layers[0].groups] == [0, 1, 4, 5]
    assert strongest(torch.tensor([1.0, 1.0, 1.0, 1.0]), 2) == [0, 1]


def test_rows_need_top_k_experts():
    with pytest.raises(MoepressError, match="at least 2 must stay"):
        planner("uniform", router="keep").make([facts(0, [1, 2, 3, 4])], set(), 1.0)
    assert planner("uniform", router="redirect").make([facts(0, [1, 2, 3, 4])], set(), 1.0).layers[0].physical == 1


def test_multiples():
    layers = [facts(i, [9, 5, 1, 0, 3, 2, 8, 7], top_k=2) for i in range(2)]
    plan = planner("uniform", router="keep", multiple_of=4).make(layers, set(), 5.0)
    assert [layer.physical for layer in plan.layers] == [4, 4]
    with pytest.raises(MoepressError, match="multiples"):
        planner("adaptive", router="keep", multiple_of=4).make(layers, set(), 5.0)


def test_plan_survives_its_file_and_editing(tmp_path):
    plan = planner().make([facts(i, [9, 5, 1, 0]) for i in range(2)], set(), 2.0)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    edited = json.loads((tmp_path / "plan.json").read_text())
    edited["layers"][0]["groups"][0]["members"].append(99)
    (tmp_path / "plan.json").write_text(json.dumps(edited))
    with pytest.raises(MoepressError, match="plan.json is not valid"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"layers": 3}', '{"layers": [], "typo": 1}'])
def test_damaged_plans_are_one_sentence(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(MoepressError, match="not valid"):
        Plan.load(tmp_path / "plan.json")


def test_redirect_cannot_drop():
    with pytest.raises(ValueError, match="redirect keeps all rows"):
        group = dict(leader=0, members=[0], weights=[1.0])
        LayerPlan.model_validate(dict(name="a", experts=2, router="redirect", groups=[group], dropped=[1]))


@pytest.mark.parametrize("name", [name for name in SIMILARITIES.names() if name not in ("random", "mean-output")])
def test_similarities_are_cosines(name):
    matrix = SIMILARITIES.create(name).matrix(facts(0, [9, 5, 1, 0]))
    assert torch.allclose(matrix, matrix.T) and torch.allclose(matrix.diagonal(), torch.ones(4).double())
    assert matrix.abs().max() <= 1 + 1e-9


@pytest.mark.parametrize("name, given", [("mean-output", {}), ("gated-output", {"measure": "distance"})])
def test_mean_outputs_are_compared_by_their_distance(name, given):
    layer = facts(0, [9, 5, 1, 0])
    mean_ED = layer.statistics[name]["sum"] / 2
    matrix = SIMILARITIES.create(name, **given).matrix(layer)
    assert all(abs(matrix[a, b] + (mean_ED[a] - mean_ED[b]).norm()) < 1e-9 for a in range(4) for b in range(4))


def test_an_expert_without_tokens_is_similar_to_nothing():
    layer = facts(0, [9, 5, 1, 0])
    layer.statistics["features"]["sum"][3] = 0
    matrix = SIMILARITIES.create("expert-feature").matrix(layer)
    assert torch.equal(matrix[3], torch.zeros(4).double())


def test_random_similarity_depends_on_seed_and_layer_only():
    random = SIMILARITIES.create("random")
    one, same, other = facts(0, [1] * 4), facts(0, [7] * 4), facts(1, [1] * 4)
    assert torch.equal(random.matrix(one), random.matrix(same))
    assert not torch.equal(random.matrix(one), random.matrix(other))


@pytest.mark.parametrize("registry", [SALIENCIES, SIMILARITIES, BUDGETS, GROUPINGS, GUARDS])
def test_typos_get_a_suggestion(registry: Registry):
    name = registry.names()[0]
    with pytest.raises(MoepressError, match=f"did you mean '{name}'"):
        registry.get(name[:-1] + "x")


@st.composite
def situations(draw):
    """Scores, similarities (with ties), leaders, router groups."""
    blocks, size = draw(st.integers(1, 2)), draw(st.integers(2, 6))
    experts = blocks * size
    small = st.integers(0, 3)
    score_E = torch.tensor(draw(st.lists(small, min_size=experts, max_size=experts))).double()
    flat = draw(st.lists(small, min_size=experts**2, max_size=experts**2))
    similarity_EE = torch.tensor(flat).double().reshape(experts, experts) - 2
    similarity_EE = (similarity_EE + similarity_EE.T) / 2
    similarity_EE.fill_diagonal_(2)
    kept = blocks * draw(st.integers(1, size))
    return score_E, similarity_EE, strongest(score_E, kept, blocks), blocks


@pytest.mark.parametrize("linkage", ["average", "single", "complete"])
@settings(max_examples=60, deadline=None)
@given(situations())
def test_clusters_partition_and_their_count_is_exact(linkage, situation):
    score_E, similarity_EE, leaders, blocks = situation
    groups = GROUPINGS.create("hierarchical", linkage=linkage).groups(score_E, similarity_EE, leaders, blocks)
    size = len(score_E) // blocks
    assert len(groups) == len(leaders) and sorted(e for group in groups for e in group) == list(range(len(score_E)))
    assert all(score_E[group[0]] == score_E[group].max() for group in groups)
    assert all(len({e // size for e in group}) == 1 for group in groups)  # nobody leaves its router group
    assert [sum(group[0] // size == block for group in groups) for block in range(blocks)] == [
        len(leaders) // blocks
    ] * blocks


def test_clusters_are_those_of_average_linkage():
    """Points on a line: the nearest two join, then the nearest clusters by the mean of all distances."""
    at_E = torch.tensor([0.0, 1.0, 2.5, 10.0, 11.0, 5.0]).double()
    similarity_EE = -(at_E[:, None] - at_E[None, :]).abs()
    score_E = torch.tensor([1, 2, 3, 1, 2, 9]).double()
    hierarchical = GROUPINGS.create("hierarchical")
    assert hierarchical.groups(score_E, similarity_EE, [0, 1, 2, 3]) == [[1, 0], [2], [4, 3], [5]]
    assert hierarchical.groups(score_E, similarity_EE, [0, 1, 2]) == [[2, 1, 0], [4, 3], [5]]
    assert hierarchical.groups(score_E, similarity_EE, [0, 1]) == [[4, 3], [5, 2, 1, 0]]


@settings(max_examples=60, deadline=None)
@given(situations(), st.integers(2, 6))
def test_caps_are_respected_from_the_most_important_down(situation, size):
    score_E, similarity_EE, leaders, blocks = situation
    capped = GROUPINGS.create("capped", size=size)
    if len(leaders) < capped.least(len(score_E)):
        return
    groups = capped.groups(score_E, similarity_EE, leaders, blocks)
    assert sorted(e for group in groups for e in group) == list(range(len(score_E)))
    assert [group[0] for group in groups] == leaders and max(len(group) for group in groups) <= size
    merging = [group for group in groups if len(group) > 1]
    full = [group for group in groups if len(group) == size]
    assert len(merging) - len(full) <= 1
    alone = [group[0] for group in groups if len(group) == 1]
    assert not merging or not alone or min(score_E[g[0]] for g in merging) >= max(score_E[e] for e in alone)


def test_capped_groups_need_enough_leaders():
    counts = [9, 8, 7, 6, 5, 4, 3, 2]
    capped = replace(planner("uniform"), grouping=GROUPINGS.create("capped", size=2))
    with pytest.raises(MoepressError, match="at least 4 must stay"):
        capped.check([facts(0, counts)], set(), 3.0)
    assert capped.make([facts(0, counts)], set(), 4.0).layers[0].physical == 4
    with pytest.raises(MoepressError, match="size must be at least 2"):
        GROUPINGS.create("capped", size=1)


@pytest.mark.parametrize("grouping", GROUPINGS.names())
@settings(max_examples=40, deadline=None)
@given(situations(), st.data())
def test_guarded_experts_are_left_alone(grouping, situation, data):
    score_E, similarity_EE, leaders, blocks = situation
    alone = frozenset(data.draw(st.sets(st.sampled_from(leaders), max_size=len(leaders) - 1)))
    made = GROUPINGS.create(grouping)
    try:
        groups = made.groups_but(alone, score_E, similarity_EE, leaders, blocks)
    except MoepressError as error:
        assert "guarded" in str(error) and not made.drops
        return
    assert all([e] in groups for e in alone) and len(groups) == len(leaders)
    members = sorted(e for group in groups for e in group)
    assert members == (sorted(leaders) if made.drops else list(range(len(score_E))))


@pytest.mark.parametrize("grouping", ["dominant", "hierarchical", "capped", "prune"])
def test_super_experts_stay_whatever_their_score(grouping):
    layer = facts(0, [9, 5, 0, 3, 2, 1])
    layer.statistics["output-norm"]["power"][2] = 50.0**32
    router = "keep" if grouping == "prune" else "redirect"
    guarded = replace(
        planner("uniform", router=router), grouping=GROUPINGS.create(grouping), guard=GUARDS.create("super-experts")
    )
    groups = guarded.make([layer], set(), 3.0).layers[0].groups
    assert len(groups) == 3 and [group.members for group in groups if group.leader == 2] == [(2,)]
    assert "output-norm" in guarded.needs
    layer.statistics["output-norm"]["power"][:4] = 50.0**32  # the rule now, not the exception
    assert guarded.guard.alone(layer) == frozenset()
    with pytest.raises(MoepressError, match="must stay as well"):
        layer.statistics["output-norm"]["power"][:] = torch.tensor([1.0, 1, 1, 1, 50, 50]).double() ** 32
        replace(guarded, grouping=GROUPINGS.create("prune"), router="redirect").make([layer], set(), 1.0)


def test_rare_experts_stay_whatever_their_score():
    layer = facts(0, [4000, 3000, 2000, 1000, 200, 100])
    sums = layer.statistics["output-norm"]
    guard = GUARDS.create("rare-experts")
    assert guard.alone(layer) == frozenset()
    sums["gated"][4] = 10 * sums["routed"][4]
    sums["gated"][5] = 10 * sums["routed"][5]  # no more than noise
    sums["gated"][0] = 10 * sums["routed"][0]  # not rare
    assert guard.alone(layer) == {4}
    guarded = replace(planner("uniform", router="keep"), grouping=GROUPINGS.create("prune"), guard=guard)
    assert {group.leader for group in guarded.make([layer], set(), 3.0).layers[0].groups} == {0, 1, 4}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.1, 1000), min_size=8, max_size=8),
    st.integers(2, 7),
    st.sampled_from([1, 2]),
    st.floats(0.1, 1),
)
def test_exceptional_experts_get_a_share_of_the_places(peak, keep, groups, most):
    layer = replace(facts(0, [500] * 8, groups=groups), keep=keep)
    layer.statistics["output-norm"]["power"] = torch.tensor(peak, dtype=torch.float64) ** 32
    alone, beyond = GUARDS.create("exceptional", most=most).alone(layer), GUARDS.create("super-experts").alone(layer)
    assert alone <= beyond
    for start in range(0, 8, 8 // groups):
        block = set(range(start, start + 8 // groups))
        assert len(alone & block) == min(len(beyond & block), int(most * keep / groups))
        if alone & block and (left := (beyond - alone) & block):
            assert min(peak[e] for e in alone & block) >= max(peak[e] for e in left)


def test_scores_weigh_where_the_operator_wants_them():
    layer = facts(0, [8, 4, 2, 2])
    plan = replace(planner("uniform"), member_weights=lambda n: [x / sum(n) for x in n])
    by_usage = plan.make([layer], set(), 1.0).layers[0].groups[0]
    assert by_usage.weights == (0.5, 0.25, 0.125, 0.125)
    layer.statistics["output-norm"] = {
        name: torch.tensor(value).double()
        for name, value in {"gated": [1.0, 2.0, 3.0, 4.0], "routed": [1.0, 1.0, 1.0, 1.0]}.items()
    }
    plan = replace(plan, saliency=SALIENCIES.create("reap"), weigh_by="score")
    by_score = plan.make([layer], set(), 1.0).layers[0].groups[0]
    assert by_score.leader == 3 and dict(zip(by_score.members, by_score.weights, strict=True))[2] == 0.3
