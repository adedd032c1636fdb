"""Experts that die out: the little used go, the budget is met, and nobody chooses the dead."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moepress
from moepress.checkpoint.compact import save_compact
from moepress.checkpoint.load import load_model
from moepress.errors import MoepressError
from moepress.models.find import find_layers
from moepress.models.walk import walk
from moepress.plan.survivors import Survivors
from moepress.prune import ProgressivePruning
from moepress.recovery import RecoverOptions, recover

from . import zoo
from .test_gradients import labelled
from .test_methods import pressed
from .test_observe import calibration

FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3", "minimax_m2", "llama4", "switch_transformers"]
KEEP = {"deepseek_v3": 6}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 4), st.data(), st.lists(st.lists(st.integers(0, 50), min_size=12, max_size=12))
)
def test_survivors_never_fall_below_their_budget_and_end_on_it(groups, each, data, usage):
    survivors = Survivors(12, each * groups, groups)
    for counts in usage:
        seen = torch.tensor(counts)
        seen[survivors.gone] = 0
        survivors.see(seen)
        survivors.prune(data.draw(st.floats(0, 2)))
        for block in range(groups):
            size = 12 // groups
            assert sum(e // size == block for e in survivors.left) >= each
    before = list(survivors.gone)
    survivors.force()
    assert survivors.done and survivors.gone[: len(before)] == before
    score_E = survivors.scores()
    assert (score_E >= 0).all()
    assert all(score_E[e] <= score_E[survivors.left].min() for e in survivors.gone)


def test_those_below_the_threshold_go_and_averages_fade():
    survivors = Survivors(4, 1, smoothing=0.5)
    survivors.see(torch.tensor([97, 1, 1, 1]))
    survivors.prune(0.1)  # a tenth of a quarter is 2.5 %
    assert survivors.gone == [3, 2, 1]
    faded = Survivors(2, 1, smoothing=0.5)
    faded.see(torch.tensor([1, 0]))
    faded.see(torch.tensor([0, 1]))
    faded.see(torch.tensor([0, 1]))
    assert faded.share_E.tolist() == [0.25, 0.75]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_form_without_training_keeps_those_that_the_router_still_uses(name):
    """The last to stay are the most used, by what the router does without those that went before."""
    _, outcome = pressed(name, batches=4, method="task-specific")
    for layer in outcome.plan.layers:
        assert len(layer.groups) in (KEEP.get(name, 4), layer.experts)
        assert all(len(group.members) == 1 for group in layer.groups)
    model = zoo.build("mixtral")
    first = next(iter(walk(model, calibration("mixtral", model, 4))))
    counts = sum(torch.bincount(batch.kept().index_TK.flatten(), minlength=8) for batch in first.batches())
    # All at once at the end is pruning by frequency, up to the weight of later batches in the average.
    given = {"plan.saliency": {"name": "progressive", "prunings": 1, "threshold": 0}}
    _, outcome = pressed("mixtral", batches=4, method="task-specific", **given)
    left = [group.leader for group in outcome.plan.layers[0].groups]
    assert counts[left].float().mean() > counts.float().mean()


def trained(name: str, teacher=None, steps: int = 12, **given):
    model = zoo.without_capacity(zoo.build(name))
    pruning = ProgressivePruning(model, KEEP.get(name, 4), steps, every=2, **given)
    options = RecoverOptions(objective="task", alpha=0.2 if teacher else 0.0, steps=steps, batch_size=2, lr=1e-3)
    report = recover(model, teacher, labelled(name, model, 3), options, hooks=[pruning])
    return model, pruning, report


@pytest.mark.parametrize("name", FAMILIES)
def test_a_compact_model_comes_out_of_training(name, tmp_path):
    model, pruning, report = trained(name, teacher=zoo.build(name))
    assert report.stopped is None and report.loss[-1] < report.loss[0] and report.kl
    inputs = zoo.batch(model, name)
    with torch.no_grad():
        masked = model(**inputs).logits
        specs = pruning.remove()
        compact = model(**inputs).logits
    assert torch.allclose(masked, compact, atol=1e-5)
    assert {layer.bank.num_experts for layer in find_layers(model)} == {KEEP.get(name, 4)}
    assert all("forward" not in layer.block.__dict__ for layer in find_layers(model))
    save_compact(model, specs, tmp_path)
    with torch.no_grad():
        assert torch.allclose(load_model(tmp_path)(**inputs).logits, compact, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_dead_are_never_chosen_not_even_when_all_scores_are_low(name):
    """A mask that multiplies (as in the reference code) makes the arg-max of a dead expert with a negative score."""
    model = zoo.build(name)
    pruning = ProgressivePruning(model, KEEP.get(name, 4), 10)
    pruning.finish()
    for layer in find_layers(model):
        weight = layer.router.weight_ED
        gone = pruning.survivors[layer.name].gone
        assert gone
        weight[[e for e in range(8) if e not in gone]] *= 30  # scores of the living far out on both sides
    seen = {name: [] for name in pruning.layers}

    def look(layer, routing):
        seen[layer.name].append(routing.index_TK[routing.weight_TK != 0])

    pruning._count = look
    model(**zoo.batch(model, name))
    for layer, chosen in seen.items():
        assert chosen and not set(torch.cat(chosen).tolist()) & set(pruning.survivors[layer].gone)


def test_padding_is_not_counted():
    model = zoo.build("qwen3_moe")
    pruning = ProgressivePruning(model, 4, 10)
    inputs = zoo.batch(model, "qwen3_moe")
    model(**inputs)
    for layer in find_layers(model):
        assert pruning.counts[layer.name].sum() == 2 * inputs["attention_mask"].sum()
    with torch.no_grad():  # evaluation in between
        model(**inputs)
    assert pruning.counts[layer.name].sum() == 2 * inputs["attention_mask"].sum()


def test_experts_go_step_by_step_and_the_budget_is_forced_halfway():
    model = zoo.build("qwen3_moe")
    pruning = ProgressivePruning(model, 4, 20, every=1, prunings=5, threshold=0.6)
    left = []
    for step in range(1, 21):
        for layer in find_layers(model):
            share = torch.arange(1.0, 9.0)
            share[pruning.survivors[layer.name].gone] = 0
            pruning.counts[layer.name] = share
        pruning.after_step(step)
        left.append(len(next(iter(pruning.survivors.values())).left))
    assert left[0] == 8 and left[9] == 4 and left[-1] == 4 and 4 < left[5] < 8
    assert left == sorted(left, reverse=True)
    assert not pruning.settled(9) and pruning.settled(10)
    assert all(each.left == [4, 5, 6, 7] for each in pruning.survivors.values())


def test_a_restart_goes_on_where_it_was():
    model = zoo.build("qwen3_moe")
    pruning = ProgressivePruning(model, 4, 20, every=1, threshold=0.9)
    for step in range(1, 7):
        model(**zoo.batch(model, "qwen3_moe", seed=step))
        pruning.after_step(step)
    state = copy.deepcopy(pruning.state_dict())
    assert any(each["gone"] for each in state["layers"].values())
    other = ProgressivePruning(zoo.build("qwen3_moe"), 4, 20, every=1, threshold=0.9)
    other.load_state_dict(state)
    pruning.finish()
    other.finish()
    assert pruning.plan() == other.plan()
    with pytest.raises(MoepressError, match="another model"):
        ProgressivePruning(zoo.build("mixtral"), 4, 20).load_state_dict(state)


def test_the_plan_can_be_carried_out_elsewhere():
    _, pruning, _ = trained("mixtral")
    whole = zoo.build("mixtral")
    result = moepress.compress(whole, plan=pruning.plan(), keep=4, method="frequency-pruning")
    assert {layer.physical for layer in result.outcome.plan.layers} == {4}
    assert pruning.remove().keys() == result.outcome.specs.keys()


@pytest.mark.parametrize(
    "name, given, message",
    [
        ("qwen3_moe", {"keep": 9}, "does not leave"),
        ("qwen3_moe", {"keep": 1}, "cannot keep 1"),
        ("deepseek_v3", {"keep": 5}, "router groups"),
        ("qwen3_moe", {"keep": 4, "until": 0.0}, "until above 0"),
        ("deepseek_v4", {"keep": 4}, "cannot have fewer router rows"),
    ],
)
def test_what_cannot_be_done_is_refused_before_training(name, given, message):
    model = zoo.build(name)
    with pytest.raises(MoepressError, match=message):
        ProgressivePruning(model, **{"steps": 10, **given})
    assert all("forward" not in layer.block.__dict__ for layer in find_layers(model))
