"""The compact Switch layer under the installed transformers, whichever rules its own Switch layers follow."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from moepress.models.layer import CompactSpec, MoELayer
from moepress.models.walk import walk
from moepress.runtime import become
from moepress.runtime.switch import CompactSwitchMLP, choose, native_rules

from . import zoo
from .families import build, calibration, logits_of, noisy

NAME, E = "switch_transformers", zoo.NUM_EXPERTS
CAPACITY_BACK = Version(transformers.__version__) >= Version("5.18")
MAP = torch.tensor([2, 0, 1, 1, 0, 2, 2, 0])


def models(capacity: int | None, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, list[MoELayer]]:
    """A native model of duplicates with this capacity (where native layers have any), and its compact form."""
    native, native_layers = build(NAME)
    compact, layers = build(NAME)
    for i, (layer, twin) in enumerate(zip(layers, native_layers, strict=True)):
        physical = noisy(layer.bank, i).select([0, 1, 2])
        twin.adapter.write_bank(twin.block, physical.select(MAP))
        if capacity is not None:
            twin.block.router.expert_capacity = capacity  # type: ignore[union-attr]
        layer.adapter.reshape(layer.block, CompactSpec(E, 3, capacity=capacity))
        layer.adapter.write_bank(layer.block, physical)
        layer.adapter.expert_map(layer.block).copy_(MAP)  # type: ignore[union-attr]
    return native.to(dtype), compact.to(dtype), layers


def native_capacity() -> int | None:
    """Of the zoo's model, as far as the installed version minds it."""
    return 4 if CAPACITY_BACK else None


def test_rules_of_the_installed_version_are_known() -> None:
    assert native_rules().capacity is CAPACITY_BACK
    assert native_rules().records_logits is CAPACITY_BACK
    _, layers = build(NAME)
    assert layers[0].router.capacity == native_capacity()
    assert layers[0].router.rule == "softmax > top-1" + (", capacity" if CAPACITY_BACK else "")


def by_hand(block: Any, x_BSD: Tensor, capacity: int | None) -> tuple[Tensor, Tensor]:
    """Token by token: the output, and which tokens found room."""
    output, served = torch.zeros_like(x_BSD), torch.zeros(x_BSD.shape[:2], dtype=torch.bool)
    for b, sequence in enumerate(x_BSD):
        taken: Counter[int] = Counter()
        for s, x_D in enumerate(sequence):
            probabilities = (block.router.classifier.weight @ x_D).softmax(dim=-1)
            e = int(probabilities.argmax())
            taken[e] += 1
            if capacity is None or taken[e] <= capacity:
                expert = block.experts[f"expert_{MAP[e]}"]
                output[b, s] = probabilities[e] * (expert.wo.weight @ (expert.wi.weight @ x_D).relu())
                served[b, s] = True
    return output, served


@pytest.mark.parametrize("capacity", [None, 1, 2])
@torch.no_grad()
def test_capacity_is_per_original_expert_and_sequence(capacity: int | None) -> None:
    _, _, layers = models(capacity)
    x_BSD = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(1))
    for layer in layers:
        expected, served = by_hand(layer.block, x_BSD, capacity)
        assert bool(served.all()) is (capacity is None)
        assert torch.allclose(layer.block(x_BSD), expected, atol=1e-5)
        assert layer.router.capacity == capacity
        _, routing = layer.adapter.observe(layer.block, lambda: layer.block(x_BSD))  # noqa: B023
        assert torch.equal(routing.weight_TK[:, 0] > 0, served.flatten())


@pytest.mark.parametrize("capacity", [None, 1, 4])
def test_native_duplicates_compute_the_same_under_their_rules(capacity: int | None) -> None:
    if (capacity is not None) is not CAPACITY_BACK:
        pytest.skip("this transformers " + ("counts capacity" if CAPACITY_BACK else "ignores capacity"))
    native, compact, layers = models(capacity)
    assert torch.allclose(logits_of(compact, NAME), logits_of(native, NAME), atol=1e-5)
    batch = calibration(native, NAME)
    dropped = 0
    for a, b in zip(walk(native, [batch]), walk(compact, [batch], layers=layers), strict=True):
        first, second = next(iter(a.batches())).routing, next(iter(b.batches())).routing
        assert torch.equal(first.index_TK, second.index_TK)
        assert torch.allclose(first.weight_TK, second.weight_TK, atol=1e-6)
        dropped += int((second.weight_TK == 0).sum())
    assert (dropped > 0) is (capacity is not None)


def test_probabilities_are_rounded_before_they_are_compared() -> None:
    # In fp32 the second expert is the better one; rounded to bf16 the two are equal and the first wins.
    logits = torch.tensor([[1.0, 1.0005, -5.0]])
    assert choose(logits, torch.float32, torch.float32)[0].item() == 1
    assert choose(logits, torch.float32, torch.bfloat16)[0].item() == 0


def test_bf16_equals_the_native_layer() -> None:
    native, _, layers = models(native_capacity(), torch.bfloat16)
    tied, x_BSD = 0, torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    for layer in layers:
        twin: Any = native.get_submodule(layer.name)
        for block in (twin, layer.block):
            # Pairs of experts that differ by less than bf16 can tell.
            rows = block.router.classifier.weight.data
            rows[1::2] = rows[::2] * 1.002
        with torch.no_grad():
            a, b = twin(x_BSD), layer.block(x_BSD)
            logits = twin.router.classifier(x_BSD.float())
        tied += int((logits.argmax(dim=-1) != choose(logits, torch.float32, torch.bfloat16)[0]).sum())
        assert a.dtype == b.dtype == torch.bfloat16
        assert torch.allclose(a.float(), b.float(), atol=1e-2, rtol=1e-2)
        # An expert chosen differently would be far off.
        assert (a.float() - b.float()).norm() < 0.01 * a.float().norm()
    assert tied > 0


@pytest.mark.parametrize("beams", [1, 2])
def test_generate(beams: int) -> None:
    native, compact, _ = models(native_capacity())
    inputs = {key: zoo.batch(native, NAME)[key] for key in ("input_ids", "attention_mask")}
    made = [m.generate(**inputs, max_new_tokens=6, num_beams=beams, do_sample=False) for m in (native, compact)]
    assert torch.equal(*made) and made[0].shape[1] > 2


def labelled(model: Any) -> dict[str, Tensor]:
    inputs = zoo.batch(model, NAME)
    return inputs | {"labels": inputs["decoder_input_ids"]}


def test_backward_reaches_router_and_experts() -> None:
    native, compact, layers = models(native_capacity())
    for model in (native, compact):
        model(**labelled(model)).loss.backward()
    for layer in layers:
        twin: Any = native.get_submodule(layer.name)
        block: Any = layer.block
        assert torch.allclose(block.router.classifier.weight.grad, twin.router.classifier.weight.grad, atol=1e-6)
        for p in range(3):
            parts = [twin.experts[f"expert_{e}"].wi.weight.grad for e in range(E) if MAP[e] == p]
            total = sum(g for g in parts if g is not None)
            made = block.experts[f"expert_{p}"].wi.weight.grad
            assert (made is None and isinstance(total, int)) or torch.allclose(made, total, atol=1e-6)


def test_router_logits_are_raw_logits() -> None:
    _, compact, layers = models(native_capacity())
    inputs = zoo.batch(compact, NAME)
    seen: list[Tensor] = []
    for layer in layers:
        layer.block.router.classifier.register_forward_hook(lambda *args: seen.append(args[2]))  # type: ignore[union-attr]
    with torch.no_grad():
        output = compact(**inputs, output_router_logits=True)
    shown = (*output.encoder_router_logits, *output.decoder_router_logits)
    assert len(shown) == len(seen) == 4
    assert all(torch.equal(a.reshape(-1, E), b.reshape(-1, E)) for a, b in zip(shown, seen, strict=True))


def test_router_losses_are_right_or_an_error() -> None:
    native, compact, _ = models(native_capacity())
    for model in (native, compact):  # the losses are left out of a model whose layers are all sparse
        model.encoder.config.encoder_sparse_step = model.decoder.config.decoder_sparse_step = 2
    with torch.no_grad():
        if not CAPACITY_BACK:  # as in the native model of these versions
            for model in (native, compact):
                with pytest.raises((ValueError, RuntimeError)):
                    model(**labelled(model), output_router_logits=True)
            return
        outputs = [model(**labelled(model), output_router_logits=True) for model in (native, compact)]
    for key in ("loss", "encoder_aux_loss", "decoder_aux_loss", "encoder_z_loss", "decoder_z_loss"):
        assert torch.allclose(outputs[0][key], outputs[1][key], atol=1e-5)


@torch.no_grad()
def test_each_physical_expert_runs_once() -> None:
    _, compact, layers = models(None)
    calls: Counter[str] = Counter()
    for layer in layers:
        for key, expert in layer.block.experts.items():  # type: ignore[union-attr, operator]
            expert.register_forward_hook(lambda *_, key=f"{layer.name}.{key}": calls.update([key]))
    logits_of(compact, NAME)
    assert calls and set(calls.values()) == {1} and len(calls) <= 3 * len(layers)


def test_names_stay_native_and_blocks_pickle() -> None:
    native, compact, layers = models(None)
    added = set(compact.state_dict()) - set(native.state_dict())
    assert added == {f"{layer.name}.router.expert_map" for layer in layers}
    block = pickle.loads(pickle.dumps(layers[0].block))
    x = torch.randn(1, 4, 32)
    assert type(block) is CompactSwitchMLP and torch.equal(block(x), layers[0].block(x))


def test_router_noise_leaves_the_experts_input_alone() -> None:
    _, _, layers = models(None)
    block: Any = layers[0].block.train()
    block.router.jitter_noise = 0.5
    x = torch.randn(2, 6, 32)
    before = x.clone()
    block(x)
    assert torch.equal(x, before)


def test_becoming_compact_under_a_wrapped_forward() -> None:
    """accelerate keeps the forward that it wraps, bound to the class of that moment."""

    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    module: Any = nn.Linear(2, 2)
    module._old_forward = module.forward
    module.forward = lambda x: module._old_forward(x)
    x = torch.ones(1, 2)
    before = module(x)
    become(module, Doubled)
    assert torch.equal(module(x), 2 * before)
