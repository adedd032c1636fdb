"""Plans: every expert goes to exactly one place, totals are exact, ties are broken and never lost."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepress.errors import MoepressError
from moepress.models.layer import ExpertBank, RouterView
from moepress.plan import BUDGETS, GROUPINGS, SALIENCIES, SIMILARITIES, LayerFacts, LayerPlan, Limits, Plan, Planner
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
        "usage": {"count": torch.tensor(counts, dtype=torch.float64)},
        "router-gram": {"gram": logits_TE.T @ logits_TE},
        "features": {name: normal(experts, width).double().abs() for name in ("sum", "abs", "square")},
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


@pytest.mark.parametrize("name", [name for name in SIMILARITIES.names() if name != "random"])
def test_similarities_are_cosines(name):
    matrix = SIMILARITIES.create(name).matrix(facts(0, [9, 5, 1, 0]))
    assert torch.allclose(matrix, matrix.T) and torch.allclose(matrix.diagonal(), torch.ones(4).double())
    assert matrix.abs().max() <= 1 + 1e-9


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


@pytest.mark.parametrize("registry", [SALIENCIES, SIMILARITIES, BUDGETS, GROUPINGS])
def test_typos_get_a_suggestion(registry: Registry):
    name = registry.names()[0]
    with pytest.raises(MoepressError, match=f"did you mean '{name}'"):
        registry.get(name[:-1] + "x")
