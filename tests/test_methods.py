"""Every method on a tiny model of each router kind: finite, right size, deterministic, and its defining property."""

from __future__ import annotations

import copy
import itertools
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.spatial.distance import pdist

from moepress.errors import MoepressError
from moepress.exact import rounder
from moepress.merge import MERGES
from moepress.methods import METHODS
from moepress.models.find import find_layers
from moepress.models.layer import permute_units
from moepress.models.walk import walk
from moepress.pipeline import press
from moepress.plan import Group, LayerPlan
from moepress.rebuild import rebuild
from moepress.recipe import make_recipe
from moepress.refit import REFITS
from moepress.refit.least_squares import Piece, Sizes, _ridge, _solve_in_turn, _solve_together
from moepress.refit.router import ROUTER_REFITS as REFITS_OF_ROUTERS
from moepress.team import ALONE

from . import zoo
from .test_observe import calibration

KEEP = {"deepseek_v3": 6}  # its routers choose 3 experts out of one of two groups
ROUTERS = ["qwen3_moe", "gpt_oss", "deepseek_v3", "minimax_m2", "phimoe", "switch_transformers", "llama4"]


DECOMPOSING = [name for name, method in METHODS if "decompose.rank" in method.uses]


def pressed(name: str, seed: int = 0, batches: int = 2, **given):
    model = zoo.build(name, seed)
    method = given.get("method", "m-smoe")
    size = {"keep": KEEP.get(name, 4)} if METHODS.get(method).fewer else {}
    small = {"decompose.rank": 4} if method in DECOMPOSING else {}
    recipe = make_recipe({"method": method} | size | small | given)
    outcome = press(model, recipe, lambda: labelled(calibration(name, model, batches)))
    return model, outcome


def labelled(batches):
    """Encoder-decoder batches with something to predict, for methods that take gradients."""
    for batch in batches:
        if "decoder_input_ids" in batch.inputs:
            batch.inputs["labels"] = batch.inputs["decoder_input_ids"]
    return batches


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("method", METHODS.names())
def test_finite_right_size_deterministic(method, name):
    model, outcome = pressed(name, method=method)
    kept = [layer.bank.num_experts for layer in find_layers(model) if layer.name in outcome.specs]
    assert sum(kept) == (KEEP.get(name, 4) if METHODS.get(method).fewer else zoo.NUM_EXPERTS) * len(kept) and kept
    with torch.no_grad():
        assert torch.isfinite(model(**zoo.batch(model, name)).logits).all()
    again, _ = pressed(name, method=method)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "switch_transformers", "llama4"])
@pytest.mark.parametrize("operator", MERGES.names())
def test_every_operator_on_gated_and_plain_experts_with_and_without_biases(operator, name):
    model, outcome = pressed(name, **{"merge.operator": operator})
    assert outcome.specs and all(torch.isfinite(p).all() for p in model.parameters())
    again, _ = pressed(name, **{"merge.operator": operator})
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


@pytest.mark.parametrize("reference", ["first", "dominant"])
@pytest.mark.parametrize("name", ["gpt_oss", "switch_transformers"])
def test_duplicates_are_found_by_their_activations(name, reference):
    """Experts that are each other's copies in another unit order merge without loss, sequentially or not."""
    model = zoo.without_capacity(zoo.build(name))
    draw = torch.Generator().manual_seed(0)
    for layer in find_layers(model):
        bank = layer.bank
        copies = [permute_units(bank.expert(0), torch.randperm(bank.hidden_units, generator=draw)) for _ in range(8)]
        layer.adapter.write_bank(layer.block, bank.map(lambda n, _, copies=copies: torch.stack([c[n] for c in copies])))
    before = copy.deepcopy(model)
    given = {"align.method": "activation-matching", "align.reference": reference, "merge.operator": "uniform"}
    press(
        model,
        make_recipe({"method": "m-smoe", "keep": 3, "plan.skip": "none", **given}),
        lambda: calibration(name, model, 4),
    )
    with torch.no_grad():
        inputs = zoo.batch(model, name)
        assert torch.allclose(model(**inputs).logits, before(**inputs).logits, atol=1e-4)


@pytest.mark.parametrize("method", [name for name in METHODS.names() if name not in DECOMPOSING])
def test_keeping_everything_changes_nothing(method):
    model, outcome = pressed("qwen3_moe", method=method, keep=1.0)
    original = zoo.build("qwen3_moe")
    assert not outcome.specs
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), original.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    "method, score", [("reap", "reap"), ("reap-all", "reap-all"), ("frequency-pruning", "frequency")]
)
def test_pruning_keeps_the_experts_with_the_highest_score(method, score):
    _, outcome = pressed("mixtral", method=method, sequential=False)
    for layer in outcome.plan.layers:
        sums = outcome.statistics.layers[layer.name]
        score_E = {
            "reap": lambda s=sums: s["output-norm"].sums["gated"] / s["output-norm"].sums["routed"].clamp_min(1),
            "reap-all": lambda s=sums: s["output-norm"].sums["gated"],
            "frequency": lambda s=sums: s["usage"].sums["count"],
        }[score]()
        kept = [group.leader for group in layer.groups]
        assert score_E[kept].min() >= score_E[list(layer.dropped)].max()
        assert all(len(group.members) == 1 for group in layer.groups)


@pytest.mark.parametrize("method", ["reap", "ream", "hc-smoe"])
def test_sequential_sees_the_compressed_model(method):
    """Statistics of the second layer are those of a model whose first layer is compressed already."""
    model, outcome = pressed("mixtral", method=method, sequential=True, router="keep")
    first, second = find_layers(model)
    batches = calibration("mixtral", model)
    half = zoo.build("mixtral")
    fresh = find_layers(half)
    first.adapter.reshape(fresh[0].block, outcome.specs[first.name])
    fresh[0].adapter.write_bank(fresh[0].block, first.bank)
    fresh[0].adapter.write_router(fresh[0].block, first.router.tensors)
    counts = torch.zeros(8, dtype=torch.float64)
    for visit in walk(half, batches):
        for batch in visit.batches():
            if visit.layer.name == second.name:
                counts += torch.bincount(batch.kept().index_TK.flatten(), minlength=8)
    assert torch.equal(outcome.statistics.of(second.name, "usage")["count"], counts)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "laguna", "granitemoe", "llama4"])
@pytest.mark.parametrize("target", ["original", "layer"])
@pytest.mark.parametrize("method", ["prune-refit", "merge-moe"])
def test_least_squares_brings_the_output_nearer_to_the_original(method, name, target):
    def error(refit) -> float:
        model, _ = pressed(name, batches=12, method=method, **{"refit.method": refit})
        original = zoo.build(name)
        total = 0.0
        with torch.no_grad():
            for batch in calibration(name, model, 12):
                a, b = model(**batch.inputs).logits, original(**batch.inputs).logits
                total += float((a - b)[batch.keep["decoder"]].square().sum())
        return total

    assert error({"name": "least-squares", "target": target, "ridge": 0.01}) < 0.9 * error("none")


@pytest.mark.parametrize("method", [name for name, cls in METHODS if "merge.operator" in cls.uses and name != "fisher"])
def test_budgets_come_from_a_first_pass_and_groups_from_the_sequential_one(method):
    """The counts are those of the whole model; what decides on groups in the second layer is not."""
    given = {"method": method, "plan.budget": "adaptive", "plan.saliency": "frequency"}
    if "refit.method" in METHODS.get(method).uses:
        given["refit.method"] = "none"
    _, at_once = pressed("mixtral", **given, sequential=False)
    _, in_turn = pressed("mixtral", **given, sequential=True)
    assert [layer.physical for layer in at_once.plan.layers] == [layer.physical for layer in in_turn.plan.layers]
    assert at_once.plan.layers[0] == in_turn.plan.layers[0]
    first, second = (
        [outcome.statistics.of(layer.name, "usage")["count"] for outcome in (at_once, in_turn)]
        for layer in at_once.plan.layers
    )
    assert torch.equal(*first) and not torch.equal(*second)


@pytest.mark.parametrize("given, name", [({}, "gated-output"), ({"preset": "paper"}, "mean-output")])
def test_hc_smoe_merges_the_clusters_of_mean_outputs(given, name):
    _, outcome = pressed("mixtral", method="hc-smoe", **given)
    for layer in outcome.plan.layers:
        sums = outcome.statistics.layers[layer.name]
        mean_ED = sums[name].sums["sum"] / sums["usage"].sums["tokens"]
        label_E = cut_tree(linkage(pdist(mean_ED.numpy()), "average"), n_clusters=4)[:, 0]
        assert {frozenset(group.members) for group in layer.groups} == {
            frozenset(np.flatnonzero(label_E == label).tolist()) for label in range(4)
        }
        count_E = sums["usage"].sums["count"]
        for group in layer.groups:
            assert count_E[group.leader] == count_E[list(group.members)].max()
            share = count_E[list(group.members)] / count_E[list(group.members)].sum().clamp_min(1)
            assert torch.allclose(torch.tensor(group.weights).double(), share) or not share.any()


def test_ream_merges_what_reap_removes_into_the_most_salient():
    _, outcome = pressed("mixtral", method="ream", preset="paper", sequential=False)
    _, pruned = pressed("mixtral", method="reap", sequential=False)
    assert all(spec.router == "rows" for spec in outcome.specs.values())
    for layer, other in zip(outcome.plan.layers, pruned.plan.layers, strict=True):
        assert [group.leader for group in layer.groups] == [group.leader for group in other.groups]
        sums = outcome.statistics.layers[layer.name]["output-norm"].sums
        score_E = sums["gated"] / sums["routed"].clamp_min(1)
        (merged,) = [group for group in layer.groups if len(group.members) > 1]
        assert merged.leader == int(score_E.argmax()) and set(merged.members[1:]) == set(other.dropped)
        share = score_E[list(merged.members)] / score_E[list(merged.members)].sum()
        assert torch.allclose(torch.tensor(merged.weights).double(), share)


@pytest.mark.parametrize("method", [name for name, cls in METHODS if "plan.guard" in cls.uses])
def test_a_super_expert_survives_every_method(method):
    """The guard decides on measured outputs, whatever the method's own score says."""

    def build():
        model = zoo.build("qwen3_moe")
        for layer in find_layers(model):
            bank = layer.bank.map(lambda name, t: t.clone())
            bank.down_EDF[5] *= 1000
            layer.adapter.write_bank(layer.block, bank)
        return model

    model = build()
    small = {"decompose.rank": 4} if method in DECOMPOSING else {}
    recipe = make_recipe({"method": method, "keep": 4, "plan.guard": "super-experts"} | small)
    outcome = press(model, recipe, lambda: calibration("qwen3_moe", model, 4))
    for layer in outcome.plan.layers:
        assert [group.members for group in layer.groups if group.leader == 5] == [(5,)]


def test_clusters_of_duplicates_are_found_and_merging_them_changes_nothing():
    model = zoo.build("qwen3_moe")
    for layer in find_layers(model):
        twice = torch.arange(8) // 2
        layer.adapter.write_bank(layer.block, layer.bank.select(twice))
        rows = {name: tensor[twice] for name, tensor in layer.router.tensors.items()}
        layer.adapter.write_router(layer.block, rows)
    before = copy.deepcopy(model)
    recipe = make_recipe({"keep": 4, "method": "hc-smoe"})
    press(model, recipe, lambda: calibration("qwen3_moe", model))
    with torch.no_grad():
        inputs = zoo.batch(model, "qwen3_moe")
        assert torch.allclose(model(**inputs).logits, before(**inputs).logits, atol=1e-5)


def test_reference_drift_is_the_difference_of_two_models():
    original = zoo.build("qwen3_moe")
    changed = copy.deepcopy(original)
    batches = calibration("qwen3_moe", changed)
    streams: dict[str, torch.Tensor] = {}
    for visit in walk(changed, batches, reference=True):
        streams = visit.drift
        for _ in visit.batches():
            pass
        bank = visit.layer.bank
        visit.layer.adapter.write_bank(visit.layer.block, bank.map(lambda n, t: 2 * t if n == "down_EDF" else t))
    # The last layer was still whole when its drift was taken.
    last_changed, last_original = find_layers(changed)[-1], find_layers(original)[-1]
    last_changed.adapter.write_bank(last_changed.block, last_original.bank)
    seen = {}
    for label, model in (("a", original), ("b", changed)):
        host = model.get_submodule(last_original.name.rpartition(".")[0])
        host.register_forward_hook(
            lambda m, a, o, label=label: seen.__setitem__(label, o[0] if isinstance(o, tuple) else o)
        )
    for i, batch in enumerate(batches):
        with torch.no_grad():
            original(**batch.inputs)
            changed(**batch.inputs)
        assert torch.allclose((seen["a"] - seen["b"]).reshape(streams[i].shape), streams[i], atol=1e-4)


def half(layer):
    """Merge every second expert into the one before it, with all router rows left."""
    groups = tuple(Group(leader=e, members=(e, e + 1), weights=(0.5, 0.5)) for e in range(0, 8, 2))
    plan = LayerPlan(name=layer.name, experts=8, router="redirect", groups=groups)
    rebuild(layer, plan, make_recipe({"method": "m-smoe", "keep": 4, "align.method": "none"}))


@torch.no_grad()
def test_merged_experts_are_solved_for_all_calls_of_a_token():
    """Under a redirect a token may call one expert twice. The solution is that of one dense ridge regression on the
    block's own response to each entry of the down projections."""
    model = zoo.build("qwen3_moe")
    refit = REFITS.create("least-squares", target="layer", relative=0.0, ridge=0.05)
    visit = next(walk(model, calibration("qwen3_moe", model, 20), sequential=True))
    layer = visit.layer
    keep_T = torch.cat([batch.keep_T for batch in visit.batches()])

    def outputs() -> torch.Tensor:
        return torch.cat([visit.output(i) for i in visit.numbers])[keep_T].double()

    whole = refit.remember(visit)
    wanted_T = outputs()[:, 0]
    half(layer)
    chosen = torch.cat([batch.kept().index_TK for batch in visit.batches()])
    assert bool((chosen // 2)[:, 0].eq((chosen // 2)[:, 1]).any())  # somebody calls one expert twice
    bank = layer.bank.map(lambda _, t: t.clone())
    missing_T = wanted_T - outputs()[:, 0]
    columns = []
    for e, f in itertools.product(range(4), range(bank.hidden_units)):
        unit = torch.zeros_like(bank.down_EDF)
        unit[e, 0, f] = 1
        layer.adapter.write_bank(layer.block, replace(bank, down_EDF=unit))
        columns.append(outputs()[:, 0])
    layer.adapter.write_bank(layer.block, bank)
    design = torch.stack(columns, dim=1)
    gram = design.T @ design
    ridge = 0.05 * gram.diagonal().mean() * torch.eye(len(gram)).double()
    expected = torch.linalg.solve(gram + ridge, design.T @ missing_T)
    refit.fit(visit, whole)
    change = (layer.bank.down_EDF - bank.down_EDF).detach()[:, 0].reshape(-1).double()
    assert torch.allclose(change, expected, atol=1e-3 * float(expected.abs().max()))


def test_fitted_rows_stand_for_the_whole_group():
    """Where a group's members have the same row, the group is as likely as all of them together: its row cannot say
    so without a bias, but in the direction that all inputs share it can. Everywhere it comes nearer to the mass."""
    model = zoo.build("qwen3_moe")
    batches = calibration("qwen3_moe", model, 12)
    visit = next(walk(model, batches, sequential=True))
    layer, router = visit.layer, REFITS_OF_ROUTERS.create("mass", ridge=1e-6)
    groups = (
        Group(leader=0, members=(0, 1, 2), weights=(1.0, 0.0, 0.0)),
        *(Group(leader=e, members=(e,), weights=(1.0,)) for e in range(3, 8)),
    )
    plan = LayerPlan(name=layer.name, experts=8, router="keep", groups=groups)
    whole = router.remember(visit)
    rebuild(layer, plan, make_recipe({"method": "m-smoe", "keep": 6, "align.method": "none"}))
    before = layer.router.weight_ED.clone()

    def off() -> float:
        """The mean of (logit - log mass)², weighted by the group's share."""
        total = weight = 0.0
        for i in visit.numbers:
            batch = visit.observe(i)[0]
            mass_T = whole[i][:, :3].logsumexp(-1)
            share_T = (mass_T - whole[i].logsumexp(-1)).exp() * batch.keep_T
            total += float((share_T * (batch.routing.logits_TE[:, 0] - mass_T).square()).sum())
            weight += float(share_T.sum())
        return total / weight

    far = off()
    router.fit(visit, plan, whole)
    near = off()
    assert near < 0.9 * far
    assert torch.equal(before[1:], layer.router.weight_ED[1:])
    for seed in range(20):  # and no row nearby is better
        draw = torch.randn(before.shape[1], generator=torch.Generator().manual_seed(seed))
        layer.router.weight_ED[0] += 0.05 * draw
        assert off() > near
        layer.router.weight_ED[0] -= 0.05 * draw


@pytest.mark.parametrize("method", ["hc-smoe", "reap"])
def test_distilled_routers_are_kept_only_where_they_help(method):
    """Nothing but routers changes, and the held-out loss is never above what it was."""
    given = {"method": method, "batches": 6}
    plain, _ = pressed("qwen3_moe", **given)
    model, outcome = pressed("qwen3_moe", **given, **{"refit.router": {"name": "distil", "steps": 8, "batch_size": 4}})
    (note,) = [note for note in outcome.notes if "distilled" in note]
    before, after = (float(number) for number in re.findall(r"[0-9.]+(?= before| after)", note))
    assert after <= before
    changed = [name for name, t in model.state_dict().items() if not torch.equal(t, plain.state_dict()[name])]
    assert all(".gate." in name for name in changed) and (changed or after == before)
    wild, _ = pressed(
        "qwen3_moe", **given, **{"refit.router": {"name": "distil", "steps": 8, "batch_size": 4, "lr": 1000.0}}
    )
    # Made worse, so the routers are those from before.
    assert all(torch.equal(t, plain.state_dict()[name]) for name, t in wild.state_dict().items())


def test_a_router_that_is_no_linear_map_is_refused_before_calibration():
    with pytest.raises(MoepressError, match="refit.router=none"):
        pressed("zaya", method="ream", **{"refit.router": "mass"})


@pytest.mark.parametrize("tokens", [0, 5, 11, 12, 40])
def test_few_tokens_and_many_are_solved_alike(tokens):
    generator = torch.Generator().manual_seed(tokens)
    units, width, batches = 12, 7, 2
    made = {
        i: (torch.randperm(50, generator=generator)[:tokens], torch.randn(tokens, units, generator=generator))
        for i in range(batches)
    }
    left = {i: torch.randn(50, width, generator=generator) for i in made}
    layer = SimpleNamespace(bank=SimpleNamespace(down_EDF=torch.zeros(1, width, units)))
    visit = SimpleNamespace(layer=layer, team=ALONE, each=lambda work: map(work, made))
    sizes = Sizes(0.0, rounder(1e4), rounder(1e4), [batches * tokens])
    change_DF = _ridge(visit, 0, made, left, sizes, 0.3)
    p = torch.cat([units_nF for _, units_nF in made.values()]).double()
    r = torch.cat([left[i][token] for i, (token, _) in made.items()]).double()
    expected = torch.linalg.solve(p.T @ p + 0.3 * torch.eye(units, dtype=torch.float64), p.T @ r).T
    # products of the units are taken in float32
    assert torch.allclose(change_DF, expected, atol=1e-4)


@pytest.mark.parametrize("merged", [False, True])
def test_solving_in_turn_approaches_solving_together(merged):
    model = zoo.build("qwen3_moe")
    visit = next(walk(model, calibration("qwen3_moe", model, 20), sequential=True))
    pieces, draw = [], torch.Generator().manual_seed(0)
    if merged:
        half(visit.layer)
    for batch in visit.batches():
        missing = torch.randn(batch.routing.hidden_TD.shape, generator=draw)
        if merged:
            expert_map = visit.layer.adapter.expert_map(visit.layer.block)
            batch = replace(batch, routing=batch.routing.redirected(expert_map))
        pieces.append(Piece(batch, missing, torch.ones(len(missing))))
    by_number = dict(enumerate(pieces))
    together = _solve_together(visit, by_number, 0.1)
    apart = _solve_in_turn(visit, by_number, 0.1, rounds=60)
    assert torch.allclose(together, apart.double(), atol=0.02 * float(together.abs().max()))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"method": "reap", "merge.operator": "uniform"}, "does not use 'merge.operator'"),
        ({"method": "reap", "router": "redirect"}, "router rows"),
        ({"merge.operator": "zipit", "align.method": "weight-matching"}, "use align.method=none"),
        ({"method": "m-smoe", "refit.method": "least-squares"}, "does not use 'refit.method'"),
        ({"method": "m-smoe", "refit.router": "mass"}, "nothing to fit"),
        ({"method": "reap", "refit.router": "mass"}, "nothing is merged"),
        ({"method": "reap", "refit.router": {"name": "distil", "steps": 0}}, "steps must be at least 1"),
        ({"method": "ream", "refit.router": {"name": "mass", "ridge": 0}}, "ridge must be positive"),
        ({"method": "ream", "plan.grouping": {"name": "capped", "size": 1}}, "size must be at least 2"),
        ({"method": "ream", "keep": 2, "plan.grouping": {"name": "capped", "size": 3}}, "at least 3 must stay"),
        ({"method": "prune-refit", "refit.method": {"name": "least-squares", "ridge": 0}}, "ridge must be positive"),
        ({"method": "prune-refit", "refit.method": {"name": "least-squares", "target": "x"}}, "target"),
    ],
)
def test_what_does_not_fit_is_refused(given, message):
    with pytest.raises(MoepressError, match=message):
        pressed("qwen3_moe", **given)


def test_every_refit_is_documented():
    assert all(cls.__doc__ for _, cls in REFITS)
