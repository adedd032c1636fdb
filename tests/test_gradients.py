"""Gradients: right in every family's layout, blind to padding and batching, refused where there can be none."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import moepress
from moepress.checkpoint.load import load_model
from moepress.data.batches import NO_LABEL
from moepress.errors import MoepressError
from moepress.models.find import find_layers
from moepress.models.implementation import quickest_experts
from moepress.models.walk import CalibrationBatch
from moepress.observe import Fisher, Statistics, check_differentiable, gather_gradients
from moepress.observe.gradients import GradientSum, mean_loss, samples_of
from moepress.pipeline import press
from moepress.recipe import make_recipe

from . import zoo
from .test_observe import calibration

LAYOUTS = "qwen3_moe gpt_oss dbrx jetmoe aria longcat_flash zaya deepseek_v3 step3p7 inkling nemotron_h llama4".split()
LAYOUTS += ["switch_transformers", "nllb_moe"]
OTHERS = sorted(set(zoo.FAMILIES) - {*LAYOUTS, "openai_privacy_filter", "diffusion_gemma"})  # these two are refused


class Total(GradientSum):
    """The mean gradient, and how often it was added to."""

    def __init__(self) -> None:
        self.samples, self.bank = 0, None

    def add_gradient(self, gradient, share):
        self.samples += 1
        scaled = gradient.map(lambda _, t: t.double() * share)
        self.bank = scaled if self.bank is None else scaled.map(lambda n, t: t + self.bank.tensors()[n])


def labelled(name: str, model, count: int = 2, domains: bool = False) -> list[CalibrationBatch]:
    batches = calibration(name, model, count)
    for i, batch in enumerate(batches):
        asked = batch.inputs.get("decoder_input_ids", batch.inputs["input_ids"])
        batch.inputs["labels"] = asked.masked_fill(~batch.keep["decoder"], NO_LABEL)
        batch.domain = f"domain {i}" if domains else ""
    return batches


def total_gradients(model, batches) -> dict[str, Total]:
    layers = find_layers(model)
    totals = {layer.name: Total() for layer in layers}
    gather_gradients(model, layers, batches, {name: [total] for name, total in totals.items()})
    return totals


def mean_of_losses(model, batches) -> float:
    with torch.no_grad(), quickest_experts(model, torch.device("cpu")):  # others cannot calculate in float64
        losses = [
            [float(mean_loss(model, inputs, labels, torch.device("cpu"))) for inputs, labels in samples_of(batch)]
            for batch in batches
        ]
    return sum(sum(each) for each in losses) / sum(len(each) for each in losses)


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_gradients_are_the_slope_of_the_loss(name):
    """In canonical form, in every layout: along a random direction of all weights of all experts."""
    model = zoo.build(name).double()
    for module in model.modules():  # an expert that is full drops tokens, and the loss jumps
        if hasattr(module, "expert_capacity"):
            module.expert_capacity = 1000
    batches, step = labelled(name, model, 1), 1e-4
    before = {key: value.clone() for key, value in model.state_dict().items()}
    totals = total_gradients(model, batches)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    draw, slope, losses, way = torch.Generator().manual_seed(0), 0.0, [], {}
    ways = {
        layer.name: layer.bank.map(lambda _, t: torch.randn(t.shape, generator=draw, dtype=t.dtype))
        for layer in find_layers(model)
    }
    for layer in find_layers(model):
        gradient = totals[layer.name].bank
        slope += sum(float((gradient.tensors()[n] * t).sum()) for n, t in ways[layer.name].tensors().items())
    for sign in (1, -1):
        moved = copy.deepcopy(model)
        for layer in find_layers(moved):
            for part, tensor in ways[layer.name].tensors().items():
                way[part] = sign * step * tensor
            layer.adapter.write_bank(layer.block, layer.bank.map(lambda n, t: t + way[n]))
        losses.append(mean_of_losses(moved, batches))
    # Norms are float32 and clamped activations have kinks; in a wrong layout the two have nothing in common.
    assert slope == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=0.15, abs=2e-3)


def test_samples_count_the_same_however_they_are_batched_and_padded():
    model = zoo.build("qwen3_moe")
    batches = labelled("qwen3_moe", model, 2)
    single = [
        CalibrationBatch(
            {key: value[i : i + 1, : int(batch.keep["decoder"][i].sum())] for key, value in batch.inputs.items()},
            {"decoder": batch.keep["decoder"][i : i + 1, : int(batch.keep["decoder"][i].sum())]},
        )
        for batch in batches
        for i in range(2)
    ]
    together, apart = total_gradients(model, batches), total_gradients(model, single)
    for name, total in together.items():
        assert total.samples == apart[name].samples == 4
        for tensor, other in zip(total.bank.tensors().values(), apart[name].bank.tensors().values(), strict=True):
            assert torch.allclose(tensor, other, atol=1e-7)


def test_domains_count_the_same():
    model = zoo.build("qwen3_moe")
    two = labelled("qwen3_moe", model, 2, domains=True)
    more = [*two, *(CalibrationBatch(two[1].inputs, two[1].keep, two[1].domain) for _ in range(3))]
    for one, other in zip(total_gradients(model, two).values(), total_gradients(model, more).values(), strict=True):
        for tensor, same in zip(one.bank.tensors().values(), other.bank.tensors().values(), strict=True):
            assert torch.allclose(tensor, same, atol=1e-9)


def test_the_gram_is_that_of_mean_gradients_and_fisher_that_of_squares():
    model = zoo.build("mixtral")
    batches, layers = labelled("mixtral", model), find_layers(model)
    statistics, fisher = Statistics(), {layer.name: Fisher() for layer in layers}
    statistics.gather_gradients(model, layers, batches, ["usage", "gradient-gram"])
    gather_gradients(model, layers, batches, {name: [total] for name, total in fisher.items()})
    totals = total_gradients(model, batches)
    each = [total_gradients(model, [one]) for batch in batches for one in split(batch)]
    for layer in layers:
        gradient = totals[layer.name].bank.tensors()
        flat = torch.cat([tensor.flatten(1) for tensor in gradient.values()], dim=1)
        assert torch.allclose(statistics.of(layer, "gradient-gram")["gram"], flat @ flat.T, rtol=1e-4, atol=1e-12)
        assert list(statistics.layers[layer.name]) == ["gradient-gram"]
        for name, tensor in fisher[layer.name].bank.tensors().items():
            squares = torch.stack([one[layer.name].bank.tensors()[name].square() for one in each]).mean(0)
            assert torch.allclose(tensor.double(), squares, rtol=1e-4, atol=1e-12)


def split(batch: CalibrationBatch) -> list[CalibrationBatch]:
    return [
        CalibrationBatch(
            {key: value[i : i + 1] for key, value in batch.inputs.items()},
            {key: value[i : i + 1] for key, value in batch.keep.items()},
        )
        for i in range(len(batch.inputs["input_ids"]))
    ]


def test_gradients_of_two_runs_do_not_add_up():
    model = zoo.build("mixtral")
    statistics = Statistics()
    statistics.gather_gradients(model, find_layers(model), labelled("mixtral", model), ["gradient-gram"])
    with pytest.raises(MoepressError, match="of one run"):
        statistics.merge(statistics)


@pytest.mark.parametrize("reference", ["first", "dominant"])
@pytest.mark.parametrize("given", [{"plan.similarity": "expert-gradient"}, {"merge.operator": "fisher"}])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "switch_transformers"])
def test_gradient_methods_do_not_depend_on_the_unit_order(name, given, reference):
    """With every expert's units stored in another order the same comes out, in the reference's order."""
    results = []
    for shuffle in (False, True):
        model = zoo.build(name)
        draw = torch.Generator().manual_seed(5)
        for layer in find_layers(model) if shuffle else ():
            orders = [torch.randperm(layer.bank.hidden_units, generator=draw) for _ in range(8)]
            experts = [permuted(layer.bank, e, order) for e, order in enumerate(orders)]
            layer.adapter.write_bank(
                layer.block, layer.bank.map(lambda n, _, ex=experts: torch.stack([one[n] for one in ex]))
            )
        options = {"method": "m-smoe", "keep": 3, "plan.budget": "uniform", "align.reference": reference, **given}
        outcome = press(model, make_recipe(options), lambda model=model: labelled(name, model))
        with torch.no_grad():
            results.append((outcome.plan, model(**zoo.batch(model, name)).logits))
    if "plan.similarity" not in given or reference == "first":  # gradients of unaligned experts cannot be compared
        assert [[g.members for g in layer.groups] for layer in results[0][0].layers] == [
            [g.members for g in layer.groups] for layer in results[1][0].layers
        ]
        assert torch.allclose(results[0][1], results[1][1], atol=1e-4)


def permuted(bank, e, order):
    from moepress.models.layer import permute_units

    return permute_units(bank.expert(e), order)


@pytest.mark.parametrize("needing", [{"plan.similarity": "expert-gradient"}, {"merge.operator": "fisher"}])
@pytest.mark.parametrize(
    "given, message",
    [
        ({"sequential": True}, "use sequential=false"),
        ({"align.method": "activation-matching", "align.reference": "first"}, "use align.method=weight-matching"),
    ],
)
def test_settings_without_gradients_are_refused_before_text_is_read(needing, given, message):
    with pytest.raises(MoepressError, match=message):
        press(
            zoo.build("qwen3_moe"),
            make_recipe({"method": "m-smoe", "keep": 4, **needing, **given}),
            lambda: pytest.fail("read"),
        )


def test_models_without_gradients_are_refused():
    model = zoo.build("openai_privacy_filter")
    with pytest.raises(MoepressError, match="does not predict tokens"):
        check_differentiable(model, find_layers(model))


@pytest.mark.parametrize("given", [{"plan.similarity": "expert-gradient"}, {"method": "fisher"}])
def test_models_in_folders_are_read_as_a_whole_where_gradients_are_needed(given, tmp_path):
    assets = Path(moepress.__file__).parent / "assets"
    paged = load_model(assets / "demo-moe", paged=True)
    with pytest.raises(MoepressError, match="paged"):
        check_differentiable(paged, find_layers(paged))
    text = {"calibration": str(assets / "demo-text.jsonl"), "calibration.samples": 2, "calibration.length": 32}
    result = moepress.compress(assets / "demo-moe", tmp_path / "out", keep=8, **text, **{"method": "m-smoe", **given})
    assert result.after.bytes < result.before.bytes
    assert (tmp_path / "out" / "tokenizer.json").exists()
    load_model(tmp_path / "out")
    with pytest.raises(MoepressError, match="cannot be resumed"):
        moepress.compress(
            assets / "demo-moe", tmp_path / "again", keep=8, resume=True, **text, **{"method": "m-smoe", **given}
        )
