"""What `auto` is made of: the walk beside the original model, what can be done with a model, elimination, trials."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepress.errors import MoepressError
from moepress.models.find import find_layers
from moepress.models.probe import probe
from moepress.models.taps import after_forward
from moepress.models.visit import LayerVisit, evenly
from moepress.models.walk import CalibrationBatch, host_of, walk
from moepress.observe import Statistics
from moepress.pipeline import facts_of, planner_of, press
from moepress.plan import Plan
from moepress.plan.saliency import SALIENCIES
from moepress.rebuild import rebuild
from moepress.recipe import make_recipe
from moepress.refit import REFITS
from moepress.trial import attempt, split

from . import zoo
from .test_observe import calibration

# Not on their own in the residual stream: a norm behind the block, several streams, another width inside.
LIMITED = {"gemma4", "afmoe", "flex_olmo", "zaya", "inkling", "nllb_moe", "qwen4_exp", "glm5_next", "hy_v4"}
NOT_LINEAR = {"gemma4", "nemotron_h", "axk1"}
REFUSED = {"diffusion_gemma": "shares its weights", "ernie4_5_vl_moe": "m-smoe", "deepseek_v4": "m-smoe"}


def streams_behind(model, batches) -> dict[str, list[torch.Tensor]]:
    """What each decoder layer returns in a plain forward pass, by the MoE layer in it."""
    seen: dict[str, list[torch.Tensor]] = {}
    handles = []
    for layer in find_layers(model):
        host = host_of(model, layer)
        keep = seen.setdefault(layer.name, [])
        watching = after_forward(host, lambda _, out, keep=keep: keep.append(out[0] if isinstance(out, tuple) else out))
        watching.__enter__()
        handles.append(watching)
    with torch.no_grad():
        for batch in batches:
            model(**{name: t for name, t in batch.inputs.items() if name != "labels"})
    for watching in handles:
        watching.__exit__(None, None, None)
    return seen


@pytest.mark.parametrize("name", ["qwen3_moe", "granitemoe", "deepseek_v3"])
def test_drift_is_how_far_the_original_model_has_been_left(name):
    model = zoo.build(name)
    batches = calibration(name, model)
    original = streams_behind(zoo.build(name), batches)
    seen = 0
    for visit in walk(model, batches, reference=True):
        now = streams_behind_layer(model, visit, batches) if seen else None
        for i in visit.numbers:
            size = visit.drift[i].shape[-1]
            norm_T = original[visit.layer.name][i].reshape(-1, size).norm(dim=1)
            assert torch.allclose(visit.stream_norm[i], norm_T, rtol=1e-4)
            if now is None:
                assert visit.drift[i].abs().max() < 1e-5
            else:
                expected = (original[visit.layer.name][i] - now[i]).reshape(-1, size)
                strength = float((visit.drift[i] * expected).sum() / visit.drift[i].square().sum())
                assert expected.norm() > 1e-3
                assert torch.allclose(visit.drift[i] * strength, expected, atol=1e-4)
        bank = visit.layer.bank
        visit.layer.adapter.write_bank(visit.layer.block, bank.map(lambda n, t: t * 0.5 if n == "down_EDF" else t))
        visit.changed()
        seen += 1
    assert seen > 1


def streams_behind_layer(model, visit, batches):
    """The stream behind this layer in the model as it is now: earlier layers changed, this one still whole."""
    return streams_behind(_twin(model), batches)[visit.layer.name]


def _twin(model):
    """The same weights without what a walk hung into the modules."""
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    return twin


@pytest.mark.parametrize("name", [name for name in zoo.FAMILIES if name not in zoo.BROKEN])
def test_auto_serves_every_family_or_says_why_not(name):
    model = zoo.build(name)
    try:
        layers = find_layers(model)
    except MoepressError as error:
        assert REFUSED[name] in str(error)
        return
    recipe = make_recipe({"method": "auto", "keep": 6})
    read: list[str] = []

    def batches():
        read.append(name)
        return calibration(name, model)

    if name in REFUSED:
        with pytest.raises(MoepressError, match=REFUSED[name]):
            press(model, recipe, batches)
        assert not read
        return
    outcome = press(model, recipe, batches)
    assert all(layer.bank.num_experts == 6 for layer in layers if layer.name in outcome.specs) and outcome.specs
    notes = " ".join(outcome.notes)
    assert ("nothing was refitted" in notes) == (name in NOT_LINEAR)
    assert ("own output" in notes) == (name in LIMITED - NOT_LINEAR)
    with torch.no_grad():
        logits = model(**zoo.batch(model, name)).logits
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name, said", [("gemma4", "linear"), ("afmoe", "linearly"), ("qwen4_exp", "streams")])
def test_what_is_asked_for_by_name_is_refused_before_calibration(name, said):
    model = zoo.build(name)
    target = {"name": "least-squares", "target": "original"}
    recipe = make_recipe({"method": "prune-refit", "keep": 6, "refit.method": target})
    with pytest.raises(MoepressError, match=said):
        press(model, recipe, lambda: calibration(name, model))


def test_probing_changes_nothing():
    model = zoo.build("granitemoe")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    found = probe(model, calibration("granitemoe", model), find_layers(model))
    assert found.stream is None and found.linear is None
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def first_visit(name: str, change=None, batches: int = 3):
    model = zoo.build(name)
    layer = find_layers(model)[0]
    if change is not None:
        layer.adapter.write_bank(layer.block, change(layer.bank))
    walked = walk(model, calibration(name, model, batches), sequential=True)
    visit = next(walked)
    visit.remember()
    return model, visit, walked


def spoken(factors: dict[int, float]):
    """A change of experts that makes some of them louder, or silent."""

    def change(bank):
        def scaled(name, t):
            t = t.clone()
            if name.startswith("down"):
                for e, factor in factors.items():
                    t[e] *= factor
            return t

        return bank.map(scaled)

    return change


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_elimination_is_the_measured_growth_of_the_error(name):
    """The score of the first expert to go: the error of the block when its router may not choose it."""
    _, visit, walked = first_visit(name)
    recipe = make_recipe({"method": "auto", "keep": 6})
    statistics = Statistics()
    statistics.gather(visit, ["usage"])
    saliency = SALIENCIES.create("elimination", rounds=100, width=10**6, tokens=10**6)
    facts = facts_of(visit, statistics, recipe)[0]
    score_E = planner_of(recipe).score(facts, saliency)
    least = int(score_E.argmin())
    expected = 0.0
    for i in visit.numbers:
        whole = visit.observe(i)[0]
        weight_T = visit.token_weight(i, saliency.relative)
        change_TD = _combined(visit, whole.routing) - _combined(visit, visit.routing_without(i, [least]))
        expected += float((change_TD.square().sum(-1) * weight_T).double().sum())
    assert float(score_E[least]) == pytest.approx(expected, rel=1e-4)
    walked.close()


def _combined(visit, routing):
    bank = visit.layer.bank
    out_TD = torch.zeros_like(routing.hidden_TD)
    for e in range(bank.num_experts):
        token_n, x_nD, gate_n = routing.calls(e)
        out_TD.index_add_(0, token_n, bank.output(e, x_nD) * gate_n[:, None])
    return out_TD


def test_elimination_ranks_an_expert_by_what_it_says():
    """One that is a thousand times as loud as the others is missed most."""
    loud = 5
    _, visit, walked = first_visit("olmoe", spoken({loud: 1000}))
    recipe = make_recipe({"method": "auto", "keep": 6})
    statistics = Statistics()
    statistics.gather(visit, ["usage"])
    score_E = planner_of(recipe).score(replace(facts_of(visit, statistics, recipe)[0], keep=6))
    assert int(score_E.argmax()) == loud
    walked.close()


def test_a_trial_leaves_the_layer_alone_and_prefers_what_hurts_less():
    """Dropping two silent experts costs little; dropping two loud ones does not."""
    _, visit, walked = first_visit("olmoe", spoken({1: 0, 6: 0, 2: 10, 3: 10}))
    layer = visit.layer
    before = {name: t.clone() for name, t in layer.block.state_dict().items()}
    recipe = make_recipe({"method": "auto", "keep": 6})
    refit = REFITS.create("none")
    fit, held = split(visit)
    tried = {}
    for dropped in ((1, 6), (2, 3)):
        kept = [e for e in range(8) if e not in dropped]
        groups = tuple({"leader": e, "members": (e,), "weights": (1.0,)} for e in kept)
        plan = Plan.model_validate(
            {"layers": [{"name": layer.name, "experts": 8, "router": "keep", "groups": groups, "dropped": dropped}]}
        )
        carry_out = partial(rebuild, plan=plan.layers[0], recipe=recipe)
        tried[dropped] = attempt(visit, carry_out, refit, fit, held).best
    # Another expert is chosen in the place of one that is gone; without a loud one, what it said is missing as well.
    assert tried[1, 6] < 0.7 * tried[2, 3]
    assert all(torch.equal(t, before[name]) for name, t in layer.block.state_dict().items())
    walked.close()


class Waiting:
    """As much of a visit as `split` looks at."""

    def __init__(self, domains, sizes):
        self.domains, self.sizes = domains, sizes
        self.numbers = list(range(len(domains)))

    by_domain = LayerVisit.by_domain

    def domain(self, i):
        return self.domains[i]

    def tokens(self, i):
        return self.sizes[i]


@settings(deadline=None)
@given(data=st.data(), count=st.integers(1, 12))
def test_batches_are_split_by_domain(data, count):
    domains = data.draw(st.lists(st.sampled_from(["a", "b", "c"]), min_size=count, max_size=count))
    sizes = data.draw(st.lists(st.integers(1, 40000), min_size=count, max_size=count))
    fit, held = split(Waiting(domains, sizes))
    assert fit and held
    if count > 1 and max(domains.count(d) for d in domains) > 1:
        assert not set(fit) & set(held)
    for domain in set(domains):  # each domain that has several batches is judged as well as fitted
        if domains.count(domain) > 1:
            assert any(domains[i] == domain for i in held) and any(domains[i] == domain for i in fit)


@given(st.integers(1, 60), st.integers(1, 60))
def test_a_choice_is_spread_over_the_whole(size, count):
    chosen = evenly(list(range(size)), count)
    assert len(chosen) == min(size, count) == len(set(chosen))
    # Each stretch of the whole is represented: no distance is more than twice the mean one.
    edges = [-1, *chosen, size]
    assert max(b - a for a, b in itertools.pairwise(edges)) <= 2 * size / len(chosen)


def test_a_batch_of_one_row_can_be_probed():
    model = zoo.build("qwen3_moe")
    rows = [
        CalibrationBatch({n: t[:1] for n, t in b.inputs.items()}, {s: k[:1] for s, k in b.keep.items()})
        for b in calibration("qwen3_moe", model)
    ]
    assert press(model, make_recipe({"method": "auto", "keep": 4}), lambda: rows).specs
