"""Every family of the zoo in its compact form: what it computes is what the native model computes."""

from __future__ import annotations

import copy
import pickle
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from moepress.errors import MoepressError
from moepress.models.layer import CompactSpec, MoELayer, Routing
from moepress.models.walk import walk

from . import zoo
from .families import WORKING, build, calibration, kept_rows, logits_of, noisy

E = zoo.NUM_EXPERTS
KEPT = [0, 2, 3, 5, 6, 7]
"""Three experts of each of the zoo's two router groups: some families choose three."""
NO_ROWS = {"ernie4_5_vl_moe"}
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def spec_of(layer: MoELayer, physical: int, router: str = "redirect") -> CompactSpec:
    # Capacity as the native layer counts it under the installed transformers: then the results must agree.
    capacity = layer.router.capacity if layer.adapter.name == "switch" else None
    return CompactSpec(E, physical, router, capacity)


def random_map(seed: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    table = torch.cat([torch.arange(k), torch.randint(k, (E - k,), generator=generator)])
    return table[torch.randperm(E, generator=generator)]


def redirected(name: str, k: int, maps: list[Tensor] | None = None) -> tuple[Any, Any, list[MoELayer]]:
    """A native model whose experts are duplicates, and the compact model that stores each of them once."""
    native, native_layers = build(name)
    compact, layers = build(name)
    for i, (layer, twin) in enumerate(zip(layers, native_layers, strict=True)):
        table = random_map(i, k) if maps is None else maps[i]
        physical = noisy(layer.bank, i).select(list(range(k)))
        twin.adapter.write_bank(twin.block, physical.select(table))
        layer.adapter.reshape(layer.block, spec_of(layer, k))
        layer.adapter.write_bank(layer.block, physical)
        expert_map = layer.adapter.expert_map(layer.block)
        assert expert_map is not None and expert_map.dtype == torch.int64 and not expert_map.requires_grad
        expert_map.copy_(table)
    return native, compact, layers


@pytest.mark.parametrize("name", WORKING)
def test_redirect_computes_what_duplicates_compute(name: str) -> None:
    native, compact, layers = redirected(name, 3)
    for layer in layers:
        assert layer.num_experts == E and layer.bank.num_experts == 3
        assert layer.adapter.refusal(layer.block) is None
    expected = logits_of(native, name)
    assert torch.allclose(logits_of(compact, name), expected, atol=1e-5)
    # Loaded into a fresh skeleton, copied and pickled, it is the same model.
    loaded, fresh = build(name, seed=5)
    for layer in fresh:
        layer.adapter.reshape(layer.block, spec_of(layer, 3))
    loaded.load_state_dict(compact.state_dict())
    assert torch.equal(logits_of(loaded, name), logits_of(compact, name))
    assert torch.equal(logits_of(copy.deepcopy(compact), name), logits_of(compact, name))
    assert type(pickle.loads(pickle.dumps(layers[0].block))) is type(layers[0].block)


@pytest.mark.parametrize("name", WORKING)
def test_identity_redirect_changes_nothing(name: str) -> None:
    model, layers = build(name)
    before = logits_of(model, name)
    for layer in layers:
        bank = layer.bank.map(lambda _, t: t.clone())
        layer.adapter.reshape(layer.block, spec_of(layer, E))
        layer.adapter.write_bank(layer.block, bank)
        layer.adapter.expert_map(layer.block).copy_(torch.arange(E))  # type: ignore[union-attr]
    after = logits_of(model, name)
    # Switch, NLLB, Llama 4 and JetMoE run code of ours, which adds up the same terms in another order.
    tolerance = 2e-6 if name in ("switch_transformers", "nllb_moe", "llama4", "jetmoe") else 0.0
    assert torch.allclose(after, before, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", WORKING)
def test_routing_of_a_redirected_layer_is_told_in_original_experts(name: str) -> None:
    native, compact, layers = redirected(name, 3)
    batch = calibration(native, name)
    natives = [next(iter(v.batches())).routing for v in walk(native, [batch])]
    for visit, expected in zip(walk(compact, [batch], layers=layers), natives, strict=True):
        routing = next(iter(visit.batches())).routing
        assert torch.equal(routing.index_TK, expected.index_TK)
        for a, b in ((routing.weight_TK, expected.weight_TK), (routing.logits_TE, expected.logits_TE)):
            assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("name", WORKING)
@pytest.mark.parametrize("router", ["redirect", "rows"])
def test_everything_else_is_left_alone(name: str, router: str) -> None:
    model, layers = build(name)
    before = {key: (tensor, tensor.clone()) for key, tensor in model.state_dict(keep_vars=True).items()}
    for layer in layers:
        if router == "redirect" or layer.adapter.rows_refusal(layer.block) is None:
            layer.adapter.reshape(layer.block, spec_of(layer, len(KEPT), router))
    after = model.state_dict(keep_vars=True)
    changed = {key for key in before if key not in after or after[key] is not before[key][0]}
    for key in changed:
        owner = next(layer for layer in layers if key.startswith(f"{layer.name}."))
        inside = key.removeprefix(f"{owner.name}.")
        assert inside.split(".")[0] in ("experts", "input_linear", "output_linear") or router == "rows", key
        assert "shared" not in key
    assert all(torch.equal(after[key], value) for key, (_, value) in before.items() if key not in changed)
    assert {key for key in after if key not in before} <= {key for key in after if key.endswith("expert_map")}
    assert all(p.requires_grad == before[key][0].requires_grad for key, p in model.named_parameters())


def cut(name: str) -> tuple[Any, list[MoELayer]]:
    """The model with the kept experts only, in layers that can have fewer rows."""
    model, layers = build(name)
    able = [layer for layer in layers if layer.adapter.rows_refusal(layer.block) is None]
    for layer in able:
        rows, bank = kept_rows(layer.router, KEPT), layer.bank.select(KEPT)
        layer.adapter.reshape(layer.block, spec_of(layer, len(KEPT), "rows"))
        layer.adapter.write_router(layer.block, rows)
        layer.adapter.write_bank(layer.block, bank)
        assert layer.num_experts == layer.bank.num_experts == len(KEPT)
        assert layer.adapter.expert_map(layer.block) is None
        assert all(torch.equal(t, rows[key]) for key, t in layer.router.tensors.items())
    return model, able


@pytest.mark.parametrize("name", [name for name in WORKING if name not in NO_ROWS])
def test_rows_compute_what_the_others_forbidden_compute(name: str) -> None:
    native, native_layers = build(name)
    compact, able = cut(name)
    if name == "zaya":  # the faster implementations forgive a skip that is not recognised
        compact.set_experts_implementation("eager")
    dropped = [e for e in range(E) if e not in KEPT]
    with ExitStack() as stack:
        for layer in native_layers:
            if layer.name in {other.name for other in able}:
                stack.enter_context(layer.adapter.forbidding(layer.block, torch.tensor([dropped]), dropped))
        expected = logits_of(native, name)
    assert not torch.allclose(expected, logits_of(native, name), atol=1e-3)
    assert torch.allclose(logits_of(compact, name), expected, atol=1e-5)


def with_count(config: Any, k: int) -> int:
    """Set every expert count of a config and of the configs in it; how many there were."""
    found = 0
    for key, value in list(vars(config).items()):
        if key in COUNTS and value == E:
            setattr(config, key, k)
            found += 1
        elif hasattr(value, "to_dict"):
            found += with_count(value, k)
    return found


@pytest.mark.parametrize("name", [name for name in WORKING if name not in NO_ROWS])
def test_vanilla_families_are_native_models_with_fewer_experts(name: str) -> None:
    if not all(layer.adapter.vanilla for layer in build(name)[1]):
        pytest.skip("has no vanilla form")
    compact, _ = cut(name)
    config = zoo.FAMILIES[name].config()
    assert with_count(config, len(KEPT))
    auto: Any = zoo.FAMILIES[name].auto
    native = (auto.from_config(config) if hasattr(auto, "from_config") else auto(config)).eval()
    native.load_state_dict(compact.state_dict(), strict=True)
    from moepress.models.find import repair

    repair(native)
    assert torch.allclose(logits_of(native, name), logits_of(compact, name), atol=2e-6)


@pytest.mark.parametrize("name", WORKING)
def test_reshape_works_without_memory(name: str) -> None:
    """The same call on the empty skeleton of a model that is about to be loaded."""
    real, layers = build(name)
    meta = copy.deepcopy(real).to("meta")
    for layer in layers:
        block = meta.get_submodule(layer.name)
        layer.adapter.reshape(block, spec_of(layer, 4))
        layer.adapter.reshape(layer.block, spec_of(layer, 4))
        shapes = {key: tuple(t.shape) for key, t in block.state_dict().items()}
        assert shapes == {key: tuple(t.shape) for key, t in layer.block.state_dict().items()}
        assert all(t.is_meta for t in block.state_dict().values())


# ---- specs that do not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("qwen3_moe", CompactSpec(7, 4), "plan for 7 experts"),
        ("qwen3_moe", CompactSpec(E, 9), "cannot keep 9"),
        ("qwen3_moe", CompactSpec(E, 0), "cannot keep 0"),
        ("qwen3_moe", CompactSpec(E, 4, "mean"), "not 'mean'"),
        ("qwen3_moe", CompactSpec(E, 4, capacity=8), "no expert capacity"),
        ("qwen3_moe", CompactSpec(E, 1, "rows"), "chooses 2 experts per token"),
        ("deepseek_v3", CompactSpec(E, 5, "rows"), "do not fit 2 router groups"),
        ("deepseek_v3", CompactSpec(E, 2, "rows"), "chooses 3 experts per token"),
        ("deepseek_v3", CompactSpec(E, 4, "rows"), "do not fit 2 router groups of which 1 are chosen for 3"),
        ("ernie4_5_vl_moe", CompactSpec(E, 4, "rows"), "share one router width"),
        ("deepseek_v4", CompactSpec(E, 4, "rows"), "token of the vocabulary its experts by number"),
    ],
)
def test_specs_that_do_not_fit(name: str, spec: CompactSpec, words: str) -> None:
    model, layers = build(name)
    before = logits_of(model, name)
    with pytest.raises(MoepressError, match=words):
        layers[0].adapter.reshape(layers[0].block, spec)
    assert torch.equal(logits_of(model, name), before)


def test_compact_layer_can_be_reshaped_but_its_rows_stay() -> None:
    _, layers = build("qwen3_moe")
    adapter, block = layers[0].adapter, layers[0].block
    adapter.reshape(block, CompactSpec(E, 4))
    adapter.reshape(block, CompactSpec(E, 3))
    assert layers[0].bank.num_experts == 3 and len(block.gate._forward_hooks) == 1  # type: ignore[union-attr]
    with pytest.raises(MoepressError, match="compact already"):
        adapter.reshape(block, CompactSpec(E, 2, "rows"))


def test_redirect_that_finds_nothing_to_map_is_an_error() -> None:
    from moepress.runtime.redirect import redirect_router

    linear = torch.nn.Linear(4, 8)
    redirect_router(linear, 8, 4)
    with pytest.raises(MoepressError, match="no expert indices"):
        linear(torch.zeros(2, 4))


# ---- Llama 4 with several experts per token -------------------------------------------------------------------------


def test_llama4_runs_a_merged_expert_once_for_each_choice() -> None:
    """Scores scale the input: two chosen experts that are one now must not be added up beforehand."""

    def model() -> tuple[Any, list[MoELayer]]:
        built, layers = build("llama4")
        for layer in layers:
            layer.block.top_k = layer.block.router.top_k = 3  # type: ignore[union-attr]
        return built, layers

    native, native_layers = model()
    compact, layers = model()
    for layer, twin in zip(layers, native_layers, strict=True):
        physical = noisy(layer.bank, 0).select([0, 1])
        twin.adapter.write_bank(twin.block, physical.select(random_map(0, 2)))
        layer.adapter.reshape(layer.block, CompactSpec(E, 2))
        layer.adapter.write_bank(layer.block, physical)
        layer.adapter.expert_map(layer.block).copy_(random_map(0, 2))  # type: ignore[union-attr]
    assert torch.allclose(logits_of(compact, "llama4"), logits_of(native, "llama4"), atol=1e-5)
    routing: Routing = next(iter(next(walk(native, [calibration(native, "llama4")])).batches())).routing
    assert routing.input_scale_TK is not None and routing.input_scale_TK.shape == (18, 3)
    assert (routing.weight_TK == 1).all()
    token, x_nD, weight_n = routing.calls(int(routing.index_TK[0, 1]))
    assert token[0] == 0 and weight_n[0] == 1
    assert torch.equal(x_nD[0], routing.hidden_TD[0] * routing.input_scale_TK[0, 1])


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "gemma4", "llama4", "nllb_moe", "jetmoe", "zaya"]
)
def test_redirect_in_bf16(name: str) -> None:
    native, compact, layers = redirected(name, 3)
    native, compact = native.to(torch.bfloat16), compact.to(torch.bfloat16)
    expected, made = logits_of(native, name).float(), logits_of(compact, name).float()
    assert (made - expected).norm() < 0.02 * expected.norm()
    for visit in walk(compact, [calibration(compact, name)], layers=layers):
        routing = next(iter(visit.batches())).routing
        assert routing.index_TK.max() < E + visit.layer.router.fixed_experts


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "switch_transformers", "nllb_moe", "llama4", "jetmoe", "aria", "dbrx", "longcat_flash"]
)
def test_gradients_are_those_of_the_duplicates(name: str) -> None:
    """A physical expert gets the sum of what its duplicates would get."""
    native, compact, _ = redirected(name, 2)
    for model in (native, compact):
        model(**zoo.batch(model, name)).logits.square().mean().backward()
    natives = dict(native.named_parameters())
    for key, parameter in compact.named_parameters():
        if parameter.shape == natives[key].shape and "expert_" not in key and natives[key].grad is not None:
            assert parameter.grad is not None, key
            assert torch.allclose(parameter.grad, natives[key].grad, atol=1e-6), key
    bank_grads = [p.grad for key, p in compact.named_parameters() if "experts" in key and "shared" not in key]
    assert name == "jetmoe" or any(grad is not None and grad.abs().max() > 0 for grad in bank_grads)


@pytest.mark.parametrize("name", [name for name in WORKING if name not in NO_ROWS])
def test_routing_without_some_experts_is_that_of_the_layer_without_them(name: str) -> None:
    native, layers = build(name)
    compact, able = cut(name)
    dropped = [e for e in range(E) if e not in KEPT]
    batch = calibration(native, name)
    smaller = {v.layer.name: next(v.batches()).routing for v in walk(compact, [batch], layers=able)}
    for visit in walk(native, [batch], layers=layers):
        if visit.layer.name not in smaller or visit.layer is not layers[0]:
            continue  # behind the first layer the inputs differ
        found, expected = visit.routing_without(0, dropped), smaller[visit.layer.name]
        kept = torch.tensor([*KEPT, *range(E, E + 8)])  # fixed rows follow the experts
        assert torch.allclose(dense(found, found.index_TK), dense(expected, kept[expected.index_TK]), atol=1e-5)
        some_N = torch.tensor([1, 4, 5])
        few = visit.narrowed(0, some_N)
        assert (few is None) == (name in NOT_BY_TOKEN or visit.layer.router.capacity is not None)
        if few is not None:  # some tokens alone are routed as they are among the others
            found, expected = few.routing_without(0, dropped), found.at(some_N)
            assert torch.allclose(dense(found, found.index_TK), dense(expected, expected.index_TK), atol=1e-5)
        before = visit.observe(0)[0].routing  # and nothing is left of it
        assert torch.equal(dense(before, before.index_TK), dense(visit.observe(0)[0].routing, before.index_TK))
        assert torch.isin(before.index_TK[before.weight_TK != 0], torch.tensor(dropped)).any()


NOT_BY_TOKEN = {"gemma4", "nllb_moe"}
"""Families whose blocks are not called with hidden states alone, or whose experts are full after so many tokens (in
newer transformers Switch's are, too)."""


def dense(routing: Routing, index_TK: Tensor) -> Tensor:
    """Every expert's weight for every token: the order of a token's choices does not matter."""
    return torch.zeros(len(index_TK), E + 8).scatter_add(1, index_TK.long(), routing.weight_TK.float())
