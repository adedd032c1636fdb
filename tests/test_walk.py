"""The lock-step walk: what a layer is shown, what happens when it is changed, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moepress.errors import MoepressError, UnsupportedModel
from moepress.models.layer import CompactSpec, MoELayer
from moepress.models.walk import CalibrationBatch, LayerVisit, walk

from . import zoo
from .families import build, calibration, logits_of, noisy

FAMILIES = ["qwen3_moe", "gemma4", "switch_transformers", "zaya", "deepseek_v4"]


def batches(model: Any, name: str) -> list[CalibrationBatch]:
    return [calibration(model, name, 0), calibration(model, name, 1, batch=1, length=5)]


def change(layer: MoELayer) -> None:
    layer.adapter.write_bank(layer.block, noisy(layer.bank, layer.index))


def inputs_of(model: Any, layers: list[MoELayer], name: str) -> dict[str, Tensor]:
    """What each layer's experts see in the model as it is now."""
    visits = walk(model, batches(model, name)[:1], layers=layers)
    return {visit.layer.name: next(iter(visit.batches())).routing.hidden_TD for visit in visits}


@pytest.mark.parametrize("name", FAMILIES)
def test_sequential_layers_see_the_changed_ones_before_them(name: str) -> None:
    model, layers = build(name)
    changed, twins = build(name)
    for i, visit in enumerate(walk(model, batches(model, name), layers=layers, sequential=True)):
        # In the twin, exactly the layers before this one have been changed.
        expected = inputs_of(changed, twins, name)[visit.layer.name]
        for _ in range(2):  # looking twice does no harm
            seen = [batch.routing.hidden_TD for batch in visit.batches()]
        assert torch.allclose(seen[0], expected, atol=1e-6)
        change(visit.layer)
        change(twins[i])
    assert torch.allclose(logits_of(model, name), logits_of(changed, name))


@pytest.mark.parametrize("name", FAMILIES)
def test_otherwise_layers_see_the_model_as_it_was(name: str) -> None:
    model, layers = build(name)
    untouched = inputs_of(*build(name), name)
    for visit in walk(model, batches(model, name), layers=layers):
        seen = [batch.routing.hidden_TD for batch in visit.batches()]
        assert torch.allclose(seen[0], untouched[visit.layer.name], atol=1e-6)
        change(visit.layer)


@pytest.mark.parametrize("name", ["qwen3_moe", "switch_transformers", "llama4", "nllb_moe", "jetmoe"])
def test_layers_may_become_compact_on_the_way(name: str) -> None:
    """Also where the block's class changes while forward passes wait in front of it."""
    model, layers = build(name)
    finished, twins = build(name)
    for visit, twin in zip(walk(model, batches(model, name), layers=layers, sequential=True), twins, strict=True):
        seen = next(iter(visit.batches())).routing.hidden_TD
        expected = inputs_of(finished, twins, name)[visit.layer.name]
        assert torch.allclose(seen, expected, atol=1e-5)
        for layer in (visit.layer, twin):
            bank = layer.bank.map(lambda _, t: t.clone())
            layer.adapter.reshape(layer.block, CompactSpec(8, 2))
            layer.adapter.write_bank(layer.block, bank.select([0, 4]))
            layer.adapter.expert_map(layer.block).copy_(torch.arange(8) // 4)  # type: ignore[union-attr]
    assert torch.allclose(logits_of(model, name), logits_of(finished, name))


@pytest.mark.parametrize("name", FAMILIES)
def test_output_is_the_blocks_own(name: str) -> None:
    model, layers = build(name)
    seen: dict[str, Tensor] = {}
    handles = [
        layer.block.register_forward_hook(lambda *args, n=layer.name: seen.update({n: args[2]})) for layer in layers
    ]
    batch = batches(model, name)[0]
    with torch.no_grad():
        model(**batch.inputs)
    for handle in handles:
        handle.remove()
    for visit in walk(model, [batch], layers=layers):
        layer_batch, output = next(visit.batches_with_output())
        native = seen[visit.layer.name]
        first = native[0] if isinstance(native, tuple) else native
        assert torch.allclose(output.flatten(), first.flatten(), atol=1e-6)
        assert output.shape[0] == layer_batch.keep_T.numel()


def test_forward_ends_after_the_last_layer() -> None:
    model, layers = build("qwen3_moe")
    ran: list[str] = []
    model.lm_head.register_forward_hook(lambda *_: ran.append("head"))
    model.model.layers[2].self_attn.register_forward_hook(lambda *_: ran.append("attention of layer 2"))
    assert len(list(walk(model, batches(model, "qwen3_moe"), layers=layers))) == 2
    assert ran == ["attention of layer 2"] * 2
    ran.clear()
    assert len(list(walk(model, batches(model, "qwen3_moe"), layers=layers[:1]))) == 1
    assert ran == []


def test_padding_is_not_kept() -> None:
    model, layers = build("qwen3_moe")
    batch = calibration(model, "qwen3_moe")
    for visit in walk(model, [batch], layers=layers):
        seen = next(iter(visit.batches()))
        assert seen.kept().hidden_TD.shape[0] == int(batch.inputs["attention_mask"].sum()) < seen.keep_T.numel()
        assert seen.kept().index_TK.shape[0] == seen.kept().logits_TE.shape[0] == seen.kept().hidden_TD.shape[0]
        assert len(visit) == 1


# ---- what is left behind ---------------------------------------------------------------------------------------------


def state(model: Any) -> tuple:
    forwards = [name for name, module in model.named_modules() if "forward" in module.__dict__]
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return forwards, hooks, model.training, model.config.use_cache


def raise_in_loop(error: BaseException, model: Any) -> None:
    for visit in walk(model, batches(model, "qwen3_moe")):
        next(iter(visit.batches()))
        raise error


def raise_while_held(error: BaseException, model: Any) -> None:
    visits = walk(model, batches(model, "qwen3_moe"))
    try:
        next(visits)
        raise error
    finally:
        visits.close()  # type: ignore[attr-defined]


def raise_in_block(error: BaseException, model: Any) -> None:
    def fail(*_: Any) -> None:
        raise error

    handle = model.model.layers[1].mlp.experts.register_forward_hook(fail)
    try:
        for visit in walk(model, batches(model, "qwen3_moe")):
            next(iter(visit.batches()))
    finally:
        handle.remove()


def raise_in_model(error: BaseException, model: Any) -> None:
    def fail(*_: Any) -> None:
        raise error

    handle = model.model.layers[2].self_attn.register_forward_hook(fail)
    try:
        list(walk(model, batches(model, "qwen3_moe")))
    finally:
        handle.remove()


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("fail", [raise_in_loop, raise_while_held, raise_in_block, raise_in_model])
def test_model_is_as_before_after_a_failure(fail: Callable, error: BaseException) -> None:
    model, _ = build("qwen3_moe")
    model.train()
    model.config.use_cache = True
    before, logits = state(model), logits_of(model.eval(), "qwen3_moe")
    model.train()
    with pytest.raises(type(error)):
        fail(error, model)
    assert state(model) == before
    assert torch.equal(logits_of(model.eval(), "qwen3_moe"), logits)
    assert torch.is_grad_enabled()
    assert len(list(walk(model, batches(model, "qwen3_moe")))) == 2  # and it can be walked again


def test_patched_instances_keep_their_patch() -> None:
    model, layers = build("qwen3_moe")
    block, calls = layers[0].block, []
    native = block.forward

    def patched(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return native(*args, **kwargs)

    block.forward = patched  # type: ignore[method-assign]
    for visit in walk(model, batches(model, "qwen3_moe"), layers=layers):
        list(visit.batches())
    assert block.forward is patched and len(calls) == 2


def test_looking_takes_no_gradients() -> None:
    model, layers = build("qwen3_moe")
    for visit in walk(model, batches(model, "qwen3_moe"), layers=layers):
        for batch, output in visit.batches_with_output():
            assert not output.requires_grad and not batch.routing.logits_TE.requires_grad
            assert not batch.routing.hidden_TD.requires_grad


# ---- layers and batches that do not fit ------------------------------------------------------------------------------


def test_layer_that_is_never_reached_is_named() -> None:
    model, layers = build("qwen3_moe")
    stranger = MoELayer("elsewhere.mlp", 2, build("qwen3_moe")[1][0].block, layers[0].adapter, layers[0].weights)
    with pytest.raises(MoepressError, match=r"never reached layer 'elsewhere.mlp'"):
        list(walk(model, batches(model, "qwen3_moe"), layers=[*layers, stranger]))
    assert state(model)[0] == []


def test_encoder_without_decoder_is_named() -> None:
    from transformers import SwitchTransformersEncoderModel

    model, layers = build("switch_transformers")
    encoder = SwitchTransformersEncoderModel(model.config).eval()
    batch = calibration(model, "switch_transformers")
    del batch.inputs["decoder_input_ids"]
    with pytest.raises(MoepressError, match=r"never reached layer 'decoder"):
        list(walk(encoder, [batch], layers=[_moved(encoder, layer) for layer in layers]))


def _moved(model: Any, layer: MoELayer) -> MoELayer:
    try:
        return MoELayer(
            layer.name, layer.index, model.get_submodule(layer.name), layer.adapter, layer.weights, layer.stack
        )
    except AttributeError:
        return layer


def test_wrong_mask_is_an_error() -> None:
    model, layers = build("qwen3_moe")
    batch = calibration(model, "qwen3_moe")
    batch.keep["decoder"] = batch.keep["decoder"][:, 1:]
    with pytest.raises(UnsupportedModel, match=r"saw 18 tokens of a batch with 16"):
        for visit in walk(model, [batch], layers=layers):
            list(visit.batches())


# ---- blocks that write to their input --------------------------------------------------------------------------------


def test_block_that_changes_its_input_in_place() -> None:
    model, layers = build("qwen3_moe")
    block: Any = layers[0].block
    native = type(block).forward

    class InPlace(type(block)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            hidden_states.mul_(1.5)
            return native(self, hidden_states)

    block.__class__ = InPlace
    expected = logits_of(model, "qwen3_moe")
    batch = calibration(model, "qwen3_moe")
    seen: list[Tensor] = []

    def look(visit: LayerVisit) -> None:
        seen.append(next(iter(visit.batches())).routing.hidden_TD)

    for visit in walk(model, [batch], layers=layers, sequential=True):
        for _ in range(3):
            look(visit)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
    alone = inputs_of(model, layers, "qwen3_moe")
    assert torch.allclose(seen[3], alone[layers[1].name], atol=1e-6)
    assert torch.equal(logits_of(model, "qwen3_moe"), expected)


@pytest.mark.parametrize("name", ["gemma4", "switch_transformers"])
def test_caches_are_off_during_the_walk(name: str) -> None:
    """A block that holds attention would append its keys once for each look."""
    model, layers = build(name)
    assert model.config.use_cache
    for visit in walk(model, [calibration(model, name)], layers=layers):
        assert not model.config.use_cache
        first, second = (next(iter(visit.batches())).routing.hidden_TD for _ in range(2))
        assert torch.equal(first, second)
    assert model.config.use_cache
    assert zoo.FAMILIES[name].name == name
