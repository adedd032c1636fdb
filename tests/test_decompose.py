"""Low rank, importance, schedules, and pruning with and without training."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepress.checkpoint.compact import attach, save_compact
from moepress.checkpoint.load import load_model
from moepress.data import window_batches
from moepress.decompose import GradualPruning, Importance, Schedule
from moepress.decompose.importance import factored_matrices, strongest_slices
from moepress.decompose.layer import factor_layer, prune_layer
from moepress.decompose.low_rank import low_rank
from moepress.decompose.moments import input_moments
from moepress.decompose.one_shot import one_shot
from moepress.decompose.refit import refit_layer, solve
from moepress.decompose.stable_rank import stable_rank, stable_ranks
from moepress.errors import MoepressError
from moepress.hook import TrainingHook
from moepress.models.find import find_layers
from moepress.models.layer import CompactSpec
from moepress.models.walk import walk
from moepress.recovery import RecoverOptions, recover

from . import zoo
from .squeeze import apart, logits, silent, squeeze  # noqa: F401
from .test_factored import decompose, merged

IDS = torch.randint(3, 96, (12, 10), generator=torch.Generator().manual_seed(0))

# ---- low rank ----------------------------------------------------------------------------------------------------


def random_matrices(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, 12, 10, generator=torch.Generator().manual_seed(seed))


def test_low_rank_is_the_best_there_is() -> None:
    w = random_matrices()
    u, v = low_rank(w, 4)
    tail = torch.linalg.svdvals(w)[:, 4:].square().sum(-1)
    assert torch.allclose((w - u @ v).square().sum((1, 2)), tail, rtol=1e-4)
    assert torch.allclose(u.square().sum((1, 2)), v.square().sum((1, 2)), rtol=1e-4)


def test_whitened_low_rank_leaves_less_of_the_output() -> None:
    w, draw = random_matrices(), torch.Generator().manual_seed(1)
    x = torch.randn(3, 200, 10, generator=draw) * torch.logspace(0, -2, 10)
    moment = x.transpose(1, 2) @ x

    def error(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (x @ (w - u @ v).transpose(1, 2)).square().sum((1, 2))

    whitened, plain = error(*low_rank(w, 4, moment)), error(*low_rank(w, 4))
    assert (whitened < 0.9 * plain).all()
    # nobody can do better: the singular values of W C^½ that are left out
    root = torch.linalg.cholesky(moment)
    assert torch.allclose(whitened, torch.linalg.svdvals(w @ root)[:, 4:].square().sum(-1), rtol=0.05)


def test_experts_without_text_get_the_plain_one() -> None:
    w = random_matrices()
    u, v = low_rank(w, 4, torch.zeros(3, 10, 10))
    assert torch.equal(u, low_rank(w, 4)[0]) and torch.equal(v, low_rank(w, 4)[1])


@pytest.mark.parametrize("name", ["qwen3_moe", "switch_transformers", "longcat_flash", "zaya"])
def test_moments_are_those_of_the_calls(name: str) -> None:
    """Of the physical experts, each with the calls of all originals that it stands for."""
    model = zoo.build(name)
    squeeze(model, "redirect")
    from .families import calibration

    for visit in walk(model, [calibration(model, name), calibration(model, name, 1)]):
        moments, bank = input_moments(visit), visit.layer.bank
        table = visit.layer.adapter.expert_map(visit.layer.block)
        assert table is not None
        into = torch.zeros_like(moments["up"])
        down = torch.zeros_like(moments["down"])
        for batch in visit.batches():
            routing = batch.kept()
            for t, k in (routing.index_TK < len(table)).nonzero().tolist():
                p, w = int(table[routing.index_TK[t, k]]), float(routing.weight_TK[t, k])
                x = routing.hidden_TD[t] * w
                h = bank.hidden(p, routing.hidden_TD[t : t + 1])[0] * w
                into[p] += torch.outer(x, x)
                down[p] += torch.outer(h, h)
        assert torch.allclose(moments["up"], into, atol=1e-3, rtol=1e-4)
        assert torch.allclose(moments["down"], down, atol=1e-3, rtol=1e-4)
        assert into.abs().max() > 0


def test_stable_rank() -> None:
    assert stable_rank(torch.eye(5, 7)) == pytest.approx(5)
    assert stable_rank(torch.outer(torch.arange(1.0, 4), torch.arange(1.0, 8))) == pytest.approx(1)
    w = random_matrices()[0]
    values = torch.linalg.svdvals(w)
    assert stable_rank(w) == pytest.approx(float(values.square().sum() / values[0] ** 2), rel=1e-4)
    assert stable_rank(torch.zeros(3, 4)) == 0
    bank = find_layers(zoo.build("qwen3_moe"))[0].bank
    assert {name: len(ranks) for name, ranks in stable_ranks(bank).items()} == {"gate": 8, "up": 8, "down": 8}


# ---- which columns stay ------------------------------------------------------------------------------------------

SCORES = st.lists(st.lists(st.integers(0, 4).map(float), max_size=9), min_size=1, max_size=4)


@given(SCORES, st.lists(st.integers(1, 5), min_size=4, max_size=4), st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_counts_are_exact_and_ties_are_broken(values: list[list[float]], widths: list[int], share: float) -> None:
    scores = {str(i): torch.tensor(each) for i, each in enumerate(values)}
    lengths = {str(i): widths[i] for i in range(len(values))}
    kept = strongest_slices(scores, lengths, share)
    whole = sum(len(each) * lengths[name] for name, each in scores.items())
    left = sum(int(kept[name].sum()) * lengths[name] for name in scores)
    budget = round(share * whole)
    gone = [float(s) for name in scores for s in scores[name][~kept[name]]]
    stay = [float(s) for name in scores for s in scores[name][kept[name]]]
    assert left <= budget
    if gone:  # the next one would have been too much
        order = [(-float(s), i, j) for i, name in enumerate(scores) for j, s in enumerate(scores[name])]
        first = min(o for o in order if not kept[str(o[1])][o[2]])
        assert left + lengths[str(first[1])] > budget
        assert all(o < first for o in order if kept[str(o[1])][o[2]])
    if stay and gone:
        assert min(stay) >= max(gone)
    if len(set(widths[: len(values)])) == 1:
        assert left == budget // widths[0] * widths[0]


def test_scores_that_are_not_finite_are_refused() -> None:
    with pytest.raises(MoepressError, match="not finite"):
        strongest_slices({"a": torch.tensor([1.0, float("nan")])}, {"a": 1}, 0.5)


# ---- schedules ---------------------------------------------------------------------------------------------------


def test_the_schedule_of_the_paper() -> None:
    cubic = Schedule(0.1, 10000)
    assert (cubic.start, cubic.end) == (400, 8400)
    assert cubic(400) == 1 and cubic(8400) == cubic(10000) == 0.1
    assert cubic(4400) == pytest.approx(0.1 + 0.9 * 0.5**3)
    assert Schedule(0.1, 10000, "quadratic")(4400) == pytest.approx(0.1 + 0.9 * 0.5**2)
    assert Schedule(0.1, 10000, "linear")(4400) == pytest.approx(0.1 + 0.9 * 0.5)
    short, long = Schedule(0.1, 100), Schedule(0.1, 50000)
    assert (short.start, short.end) == (4, 84) and (long.start, long.end) == (400, 48400)


@given(st.integers(1, 20000), st.floats(0, 1), st.sampled_from(["cubic", "quadratic", "linear"]))
@settings(max_examples=100, deadline=None)
def test_schedules_only_fall(steps: int, final: float, shape: Any) -> None:
    schedule = Schedule(final, steps, shape)
    shares = [schedule(t) for t in sorted({0, 1, *range(0, steps, max(1, steps // 50)), schedule.end - 1, steps})]
    assert shares[0] == 1 or steps == 0
    assert all(a >= b >= final for a, b in itertools.pairwise(shares))
    assert shares[-1] == final and schedule(schedule.end) == final


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shape": "cubik"}, "did you mean 'cubic'"),
        ({"final": 1.5}, "from 0 to 1"),
        ({"warmup": 6, "cooldown": 4}, "leave no step of 10"),
    ],
)
def test_schedules_that_do_not_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(MoepressError, match=words):
        Schedule(**{"final": 0.1, "steps": 10} | options)


# ---- without training --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("along", ["columns", "rows"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "switch_transformers"])
def test_importance_is_that_of_every_entry(name: str, along: str) -> None:
    """|s ∇s| by hand from the gradient of the dense matrices."""
    model, batches = one_shot_model(name, along)
    found: dict[str, torch.Tensor] = {}

    matrices = factored_matrices(model)
    kept = one_shot(model, batches, 0.25, Importance(smoothing=None))
    for batch in batches:
        inputs = {key: tensor for key, tensor in batch.inputs.items() if key != "labels"}
        from moepress.data.batches import next_token_labels

        logits = model(**inputs).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), next_token_labels(batch).flatten()).backward()
        for key, matrix in matrices.items():
            rows = matrix.sparse_rows()
            entries = (matrix.packed_Px[rows] * matrix.packed_Px.grad[rows]).abs()  # type: ignore[index]
            found[key] = found.get(key, 0) + entries.sum(1).detach() / len(batches)
        model.zero_grad()
    expected = strongest_slices(found, {key: m.packed_Px.shape[1] for key, m in matrices.items()}, 0.25)
    assert all(torch.equal(kept[key], expected[key]) for key in matrices)
    total = sum(m.packed_Px.shape[1] * len(m.index) for m in matrices.values())
    left = sum(m.packed_Px.shape[1] * int(kept[key].sum()) for key, m in matrices.items())
    assert 0.24 * total < left <= 0.25 * total
    assert len({float(k.float().mean()) for k in kept.values()}) > 1  # the threshold is one for all
    assert all(parameter.grad is None for parameter in model.parameters())


def one_shot_model(name: str, along: str = "columns") -> tuple[Any, Any]:
    model = zoo.build(name)
    decompose(model, merged(model, "redirect"), along)
    if name == "switch_transformers":
        model.config.decoder_start_token_id = 0
    return model, window_batches(IDS, model.config, batch_size=4)


# ---- while training ----------------------------------------------------------------------------------------------

FAST: dict[str, Any] = {"steps": 16, "batch_size": 4, "lr": 3e-3, "warmup": 2}


def student(name: str = "qwen3_moe") -> tuple[Any, dict[str, CompactSpec]]:
    model = zoo.build(name)
    specs = decompose(model, merged(model, "redirect"))
    if name == "switch_transformers":
        model.config.decoder_start_token_id = 0
    return attach(model, specs), specs


def share_left(model: Any) -> float:
    """Of the rows of S that are not zero, counted in the weights."""
    left, whole = 0, 0
    for matrix in factored_matrices(model).values():
        rows = matrix.packed_Px[matrix.sparse_rows()]
        left += int((rows != 0).any(1).sum()) * rows.shape[1]
        whole += matrix.experts * matrix.choices * rows.shape[1]
    return left / whole


@pytest.mark.parametrize("name", ["qwen3_moe", "switch_transformers"])
def test_what_is_saved_computes_what_was_trained(name: str, tmp_path: Any) -> None:
    teacher = zoo.build(name)
    model, specs = student(name)
    teacher.config = copy.deepcopy(model.config)
    batches = window_batches(IDS, model.config, batch_size=4)
    shares = []

    class Watched(GradualPruning):
        def after_step(self, step: int) -> None:
            super().after_step(step)
            shares.append(share_left(model))

    hook = Watched(model, Schedule(0.1, FAST["steps"]))
    assert isinstance(hook, TrainingHook)
    report = recover(model, teacher, batches, RecoverOptions(**FAST), [hook])
    assert report.stopped is None
    schedule = hook.schedule
    # a step's share is exact to one column
    assert all(schedule(t) - 0.01 < share <= schedule(t) + 1e-9 for t, share in enumerate(shares, start=1))
    assert not hook.settled(schedule.end - 1) and hook.settled(schedule.end)
    masked = logits(model, name)
    pruned = hook.remove(specs)
    assert apart(logits(model, name), masked) <= 1e-5
    save_compact(model, pruned, tmp_path)
    loaded = load_model(tmp_path)
    assert apart(logits(loaded, name), masked) <= 1e-4
    sparse = [len(m.index) * m.packed_Px.shape[1] for m in factored_matrices(loaded).values()]
    whole = [m.experts * m.choices * m.packed_Px.shape[1] for m in factored_matrices(loaded).values()]
    assert 0.09 * sum(whole) < sum(sparse) <= 0.1 * sum(whole)
    with pytest.raises(MoepressError, match="pruned already"):
        GradualPruning(loaded, Schedule(0.05, 10))


def test_neither_momentum_nor_a_master_copy_brings_columns_back() -> None:
    """An optimiser that writes from a copy of the weights in another precision, as mixed precision does."""
    model, _ = student()
    hook = GradualPruning(model, Schedule(0.3, 8, warmup=0, cooldown=4))
    masters = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    chosen = None
    for step in range(1, 9):
        model(input_ids=IDS[:4], labels=IDS[:4]).loss.backward()
        hook.after_backward(step)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    masters[name] -= 0.01 * parameter.grad
                parameter.copy_(masters[name])  # whatever was set to zero is back
        model.zero_grad()
        hook.after_step(step)
        assert share_left(model) <= hook.schedule(step) + 1e-9
        if step >= hook.schedule.end:
            chosen = chosen or {name: kept.clone() for name, kept in hook.kept.items()}
            assert all(torch.equal(chosen[name], kept) for name, kept in hook.kept.items())


def test_a_run_goes_on_where_it_was() -> None:
    def steps(model: Any, hook: GradualPruning, numbers: range) -> None:
        for step in numbers:
            model.zero_grad()
            model(input_ids=IDS[step : step + 3], labels=IDS[step : step + 3]).loss.backward()
            hook.after_backward(step)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.01 * parameter.grad
            hook.after_step(step)

    model, _ = student()
    straight = GradualPruning(model, Schedule(0.2, 8))
    steps(model, straight, range(1, 9))

    other, _ = student()
    first = GradualPruning(other, Schedule(0.2, 8))
    steps(other, first, range(1, 5))
    state, weights = copy.deepcopy(first.state_dict()), copy.deepcopy(other.state_dict())
    again, _ = student()
    again.load_state_dict(weights)
    second = GradualPruning(again, Schedule(0.2, 8))
    second.load_state_dict(state)
    steps(again, second, range(5, 9))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    third = GradualPruning(student("switch_transformers")[0], Schedule(0.2, 8))
    with pytest.raises(MoepressError, match="another model"):
        third.load_state_dict(state)


def test_a_run_that_stopped_early_is_pruned_all_the_same() -> None:
    model, specs = student()
    hook = GradualPruning(model, Schedule(0.1, 1000))
    model(input_ids=IDS[:4], labels=IDS[:4]).loss.backward()
    hook.after_backward(1)
    hook.after_step(1)
    assert share_left(model) == 1
    hook.finish()
    assert share_left(model) <= 0.1
    assert hook.remove(specs).keys() == specs.keys()


def test_what_cannot_be_pruned() -> None:
    model = zoo.build("qwen3_moe")
    with pytest.raises(MoepressError, match="not decomposed"):
        GradualPruning(model, Schedule(0.1, 10))
    for options in ({"reduce": "max"}, {"smoothing": 1.0}):
        with pytest.raises(MoepressError, match="decompose"):
            Importance(**options)
    layer = find_layers(model)[0]
    spec = factor_layer(layer, CompactSpec(8, 8, "rows"), 8, "columns")
    with pytest.raises(MoepressError, match="whole matrices cannot be written"):
        layer.adapter.write_bank(layer.block, layer.bank)
    with pytest.raises(MoepressError, match="decomposed already"):
        layer.adapter.reshape(layer.block, spec)
    hook = GradualPruning(model, Schedule(0.1, 10))
    with pytest.raises(MoepressError, match="no gradient"):
        hook.finish()


# ---- solving again -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("along", ["columns", "rows"])
@pytest.mark.parametrize("kept", [[], [0, 5], list(range(8)), list(range(10))], ids=len)
@pytest.mark.parametrize("whiten", [False, True])
def test_nothing_nearer_has_this_rank_and_keeps_these(along: str, kept: list[int], whiten: bool) -> None:
    """Against a long descent from another start, which may choose all of U, V and the kept part of S."""
    draw = torch.Generator().manual_seed(0)
    w_OI = torch.randn(12, 10, generator=draw)
    x = torch.randn(300, 10, generator=draw) @ torch.randn(10, 10, generator=draw)
    moment = x.T @ x / 300 if whiten else None
    root = torch.eye(10) if moment is None else torch.linalg.cholesky(moment)

    def whole(u: torch.Tensor, v: torch.Tensor, s_K: torch.Tensor) -> torch.Tensor:
        made = u @ v
        if along == "columns":
            return made.index_add(1, torch.tensor(kept, dtype=torch.long), s_K.T)
        return made.index_add(0, torch.tensor(kept, dtype=torch.long), s_K)

    def error(*parts: torch.Tensor) -> torch.Tensor:
        return ((w_OI - whole(*parts)) @ root).square().sum()

    solved = solve(w_OI, torch.tensor(kept, dtype=torch.long), 3, along, moment)
    found = float(error(*solved))
    assert solved[0].shape == (12, 3) and solved[1].shape == (3, 10)
    parts = [(p + 0.3 * torch.randn(p.shape, generator=draw)).contiguous() for p in solved]
    for part in parts:
        part.requires_grad_()
    optimizer = torch.optim.LBFGS(parts, max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = error(*parts)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    assert found <= float(error(*parts).detach()) * 1.02 + 1e-5  # the ridge costs a little


@pytest.mark.parametrize("along", ["columns", "rows"])
def test_a_refitted_layer_is_nearer_to_the_whole_one(along: str) -> None:
    """With equal columns kept, on the text that it was solved for; and what was kept is what is stored."""
    from .families import calibration

    model = zoo.build("qwen3_moe")
    (layer, *_) = find_layers(model)
    spec = factor_layer(layer, CompactSpec(8, 8, "rows"), 4, along)
    batches = [calibration(model, "qwen3_moe", seed, batch=8, length=24) for seed in range(4)]
    factors = layer.adapter.factors(layer.block)
    assert factors is not None
    draw = torch.Generator().manual_seed(0)
    kept = {name: torch.rand(len(m.index), generator=draw) < 0.2 for name, m in factors.matrices().items()}
    whole: dict[int, torch.Tensor] = {}
    errors = {}
    for way in ("whole", "pruned", "plain", "whitened"):
        other = copy.deepcopy(layer.block)
        mine = dataclasses.replace(layer, block=other)
        errors[way] = 0.0
        for visit in walk(model, batches, layers=[layer]):
            moments = input_moments(visit) if way == "whitened" else None
            if way == "pruned":
                made = prune_layer(mine, spec, kept)
            elif way != "whole":
                made = refit_layer(mine, spec, kept, moments)
            beside = visit.beside(other, visit.numbers)
            for i, (_, output_TD) in enumerate(beside.batches_with_output()):
                whole.setdefault(i, output_TD)
                errors[way] += float((output_TD - whole[i]).square().sum())
        if way != "whole":
            own = mine.adapter.factors(other)
            assert own is not None and own.shape() == made.factors
            assert all(len(m.index) == int(kept[name].sum()) for name, m in own.matrices().items())
    assert errors["whole"] == 0
    assert errors["whitened"] < 0.9 * errors["plain"] and errors["plain"] < errors["pruned"]
