"""Every family of the zoo: its experts are read and written rightly, and its routing is seen as it is."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moepress.errors import UnsupportedModel
from moepress.models.find import adapter_of, find_layers, left_whole, scan
from moepress.models.layer import MoELayer, RouterView, Routing, permute_units
from moepress.models.walk import walk

from . import zoo
from .families import REFUSED, WORKING, build, calibration, logits_of, noisy


@pytest.mark.parametrize("name", WORKING)
def test_bank_is_read_and_written_exactly(name: str) -> None:
    model, layers = build(name)
    before = logits_of(model, name)
    saved = [layer.bank.map(lambda _, t: t.clone()) for layer in layers]
    for i, layer in enumerate(layers):
        layer.adapter.write_bank(layer.block, noisy(layer.bank, i))
    assert not torch.allclose(logits_of(model, name), before, atol=1e-3)
    for layer, bank in zip(layers, saved, strict=True):
        layer.adapter.write_bank(layer.block, bank)
        assert bank.num_experts == layer.num_experts == zoo.NUM_EXPERTS
        assert all(torch.equal(t, bank.tensors()[key]) for key, t in layer.bank.tensors().items())
    assert torch.equal(logits_of(model, name), before)


@pytest.mark.parametrize("name", WORKING)
def test_order_of_hidden_units_does_not_matter(name: str) -> None:
    model, layers = build(name)
    before = logits_of(model, name)
    for layer in layers:
        bank = layer.bank.map(lambda _, t: t.clone())
        for e in range(bank.num_experts):
            order = torch.randperm(bank.hidden_units, generator=torch.Generator().manual_seed(e))
            for key, tensor in permute_units(bank.expert(e), order).items():
                bank.tensors()[key][e] = tensor
        layer.adapter.write_bank(layer.block, bank)
    assert torch.allclose(logits_of(model, name), before, atol=1e-5)


class Plain:
    """A plain forward of the model, with hooks of the test's own on each layer."""

    def __init__(self, model: Any, layers: list[MoELayer], inputs: dict[str, Tensor]) -> None:
        self.called: dict[str, tuple] = {}
        self.experts_output: dict[str, Tensor] = {}
        self.scored: dict[str, Tensor] = {}
        self.routing: dict[str, Routing] = {}
        handles = []
        for layer in layers:
            adapter: Any = layer.adapter
            router, experts = adapter.router(layer.block), adapter.experts(layer.block)
            owner = layer.block.get_submodule(adapter.scoring(layer.block)[0].rpartition(".")[0])
            handles += [
                router.register_forward_pre_hook(lambda _, args, n=layer.name: self.see_scored(n, args)),
                owner.register_forward_pre_hook(lambda _, args, n=layer.name: self.see_scored(n, args)),
                experts.register_forward_hook(lambda _, args, out, n=layer.name: self.see_experts(n, args, out)),
            ]
        with torch.no_grad():
            model(**inputs)
        for handle in handles:
            handle.remove()
        for layer in layers:
            layer.block.forward = self.observing(layer, layer.block.forward)  # type: ignore[method-assign]
        with torch.no_grad():
            model(**inputs)
        for layer in layers:
            del layer.block.forward

    def observing(self, layer: MoELayer, native: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            output, self.routing[layer.name] = layer.adapter.observe(layer.block, lambda: native(*args, **kwargs))
            return output

        return forward

    def see_scored(self, name: str, args: tuple) -> None:
        self.scored[name] = args[0].reshape(-1, args[0].shape[-1])

    def see_experts(self, name: str, args: tuple, output: Any) -> None:
        self.called[name] = args
        self.experts_output[name] = output


def experts_sum(layer: MoELayer, routing: Routing) -> Tensor:
    """What the routed experts add up to, from the bank and the routing alone."""
    bank, total = layer.bank, torch.zeros_like(routing.hidden_TD)
    for e in range(bank.num_experts):
        token, x_nD, weight_n = routing.calls(e)
        total.index_add_(0, token, bank.output(e, x_nD) * weight_n[:, None])
    return total


@pytest.mark.parametrize("name", WORKING)
def test_bank_and_routing_make_the_experts_output(name: str) -> None:
    model, layers = build(name)
    batch = calibration(model, name)
    plain = Plain(model, layers, batch.inputs)
    for visit in walk(model, [batch], layers=layers):
        layer = visit.layer
        (seen, output) = next(visit.batches_with_output())
        routing = seen.routing
        made = experts_sum(layer, routing)
        assert made.abs().max() > 0.01
        if name == "longcat_flash":  # the identity experts return their input
            identity = torch.where(routing.index_TK >= layer.num_experts, routing.weight_TK, 0.0)
            made += routing.hidden_TD * identity.sum(dim=1, keepdim=True)
        if name == "jetmoe":  # there is no experts module: the block adds a bias, and nothing else
            expected = output - layer.block.bias
        elif name == "llama4":  # each expert returns all tokens, with zeros for those that did not choose it
            expected = plain.experts_output[layer.name].view(layer.num_experts, *made.shape).sum(dim=0)
        else:
            expected = plain.experts_output[layer.name].reshape(made.shape)
        assert torch.allclose(made, expected, atol=1e-5)


@pytest.mark.parametrize("name", WORKING)
def test_walk_sees_the_routing_of_a_plain_forward(name: str) -> None:
    """Over padded batches, side by side: masks, positions and everything else must be those of a plain forward."""
    model, layers = build(name)
    batches = [calibration(model, name, 0), calibration(model, name, 1, batch=3, length=6)]
    plain = [Plain(model, layers, batch.inputs) for batch in batches]
    for step, visit in enumerate(walk(model, batches, layers=layers)):
        layer = visit.layer
        assert layer is layers[step]
        for i, seen in enumerate(visit.batches()):
            routing, view = seen.routing, layer.router
            assert torch.equal(seen.keep_T, batches[i].keep[layer.stack].reshape(-1))
            assert routing.index_TK.shape == routing.weight_TK.shape == (seen.keep_T.numel(), view.top_k)
            called = [t for t in plain[i].called.get(layer.name, ()) if isinstance(t, Tensor)]
            for tensor in called:
                if tensor.shape == routing.index_TK.shape and name not in ("zaya", "switch_transformers"):
                    expected = routing.weight_TK if tensor.is_floating_point() else routing.index_TK
                    assert torch.allclose(tensor, expected, atol=1e-6, rtol=0)
            alone = plain[i].routing[layer.name]
            assert torch.equal(routing.index_TK, alone.index_TK)
            assert torch.allclose(routing.weight_TK, alone.weight_TK, atol=1e-6, rtol=0)
            assert torch.allclose(routing.hidden_TD, alone.hidden_TD, atol=1e-5)
            check_logits(layer, plain[i].scored[layer.name], routing, view)


def check_logits(layer: MoELayer, scored_TD: Tensor, routing: Routing, view: RouterView) -> None:
    """The logits are the linear map of what the router saw, before anything else happens to them."""
    adapter: Any = layer.adapter
    bias = view.tensors.get(adapter.scoring(layer.block)[0].removesuffix("weight") + "bias")
    expected = nn.functional.linear(scored_TD.float(), view.weight_ED.float(), bias)
    assert routing.logits_TE.shape == expected.shape
    assert torch.allclose(routing.logits_TE.float(), expected, atol=1e-5)


# ---- the rule that is shown to people -------------------------------------------------------------------------------


def scores_of(rule: str, logits_TE: Tensor) -> Tensor:
    if rule.startswith("softcap"):
        logits_TE = 4.0 * torch.tanh(logits_TE / 4.0)
    if "sqrtsoftplus" in rule:
        return nn.functional.softplus(logits_TE).sqrt()
    return logits_TE.sigmoid() if "sigmoid" in rule else logits_TE.softmax(dim=-1)


def groups_masked(scores_TE: Tensor, view: RouterView, best_of: int) -> Tensor:
    groups_TGe = scores_TE.unflatten(-1, (view.groups, -1))
    chosen = groups_TGe.topk(best_of, dim=-1)[0].sum(dim=-1).topk(view.topk_groups, dim=-1)[1]
    allowed = torch.zeros(groups_TGe.shape[:2], dtype=torch.bool).scatter(1, chosen, True)
    return scores_TE.masked_fill(~allowed.repeat_interleave(groups_TGe.shape[-1], dim=1), float("-inf"))


def by_rule(rule: str, view: RouterView, logits_TE: Tensor, best_of: int) -> tuple[Tensor, Tensor]:
    """Indices and weights as the words say."""
    if rule.startswith("top-k >"):
        top, index_TK = logits_TE.topk(view.top_k, dim=-1)
        return index_TK, top.sigmoid() if "sigmoid" in rule else top.softmax(dim=-1)
    scores_TE = scores_of(rule, logits_TE)
    steering = scores_TE
    if "+ bias" in rule:
        steering = steering + next(t for key, t in view.tensors.items() if "bias" in key.rpartition(".")[2])
    if "> groups" in rule:
        steering = groups_masked(steering, view, best_of)
    count = int(re.search(r"top-(\d+)", rule)[1]) if re.search(r"top-\d", rule) else view.top_k  # type: ignore[index]
    index_TK = steering.topk(count, dim=-1)[1]
    weight_TK = scores_TE.gather(1, index_TK)
    if "renormalised" in rule:
        weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
    if "per-expert scale" in rule:
        weight_TK = weight_TK * view.tensors["router.per_expert_scale"][index_TK]
    return index_TK, weight_TK


@pytest.mark.parametrize("name", WORKING)
def test_rule_describes_what_happens(name: str) -> None:
    model, layers = build(name)
    for visit in walk(model, [calibration(model, name)], layers=layers):
        view, routing = visit.layer.router, next(iter(visit.batches())).routing
        assert not view.rule.startswith("unknown")
        if view.rule in ("sparsemixer",) or view.rule.startswith("token table"):
            continue
        if view.rule.startswith("MLP"):  # Zaya: with a last row for the skip
            skipped = routing.index_TK == visit.layer.num_experts
            assert skipped.any() and (routing.weight_TK[skipped] == 0).all()
        tried = [by_rule(view.rule, view, routing.logits_TE.float(), best_of) for best_of in (1, 2)]
        index, weight = next(t for t in tried if torch.equal(t[0].sort()[0], routing.index_TK.sort()[0]))
        if name == "llama4" or "shared experts" in view.rule or view.rule.startswith("MLP"):
            continue
        # The same weights, up to one factor for all (routed_scaling_factor, 1/k, dropout) and dropped tokens.
        position = (routing.index_TK[:, :, None] == index[:, None, :]).int().argmax(dim=-1)
        weight, served = weight.gather(1, position), routing.weight_TK != 0
        ratio = (routing.weight_TK / weight)[served]
        if view.capacity is None and "capacity" not in view.rule:
            assert served.all()
        if name == "nllb_moe":
            continue  # renormalised among those that were served
        assert torch.allclose(ratio, ratio[0].expand_as(ratio), rtol=1e-4)


# ---- finding and refusing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in WORKING if zoo.FAMILIES[name].encoder_decoder])
def test_encoder_comes_before_decoder(name: str) -> None:
    model, layers = build(name)
    stacks = [layer.stack for layer in layers]
    assert stacks == sorted(stacks, reverse=True) and set(stacks) == {"encoder", "decoder"}
    assert all(layer.stack in layer.name for layer in layers)
    batch = calibration(model, name)
    visited = [(visit.layer.name, next(iter(visit.batches())).keep_T.numel()) for visit in walk(model, [batch])]
    assert [n for n, _ in visited] == [layer.name for layer in layers]
    assert [t for _, t in visited] == [batch.keep[layer.stack].numel() for layer in layers]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_families_say_why(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=REFUSED[name]) as error:
        find_layers(zoo.build(name))
    assert "layers.0'" in str(error.value) and str(error.value).count("\n") == 0


def test_doge_is_refused_by_name() -> None:
    from transformers import DogeConfig, DogeForCausalLM

    config = DogeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, is_moe=True, num_experts=16, num_experts_per_tok=2,
    )  # fmt: skip
    with pytest.raises(UnsupportedModel, match=r"'model.layers.0.mlp'.*product keys"):
        find_layers(DogeForCausalLM(config))


def test_dense_model_is_refused() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8,
                         num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    with pytest.raises(UnsupportedModel, match="dense model"):
        find_layers(Qwen3ForCausalLM(config))


class Strange(nn.Module):
    """Experts of a layout that nobody has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


def damage(kind: str, block: Any) -> None:
    if kind == "extra":
        block.experts.gate_up_proj_scale = nn.Parameter(torch.ones(8))
    elif kind == "rows":
        block.gate.weight = nn.Parameter(torch.zeros(9, 32))
    elif kind == "router-tensor":
        block.gate.temperature = nn.Parameter(torch.ones(8))
    elif kind == "router-map":
        block.gate.before = nn.Linear(32, 32)
    elif kind == "dtype":
        block.experts.gate_up_proj.data = block.experts.gate_up_proj.data.to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("extra", "experts hold tensors that moepress does not know: gate_up_proj_scale"),
        ("rows", "has 9 rows for 8 experts"),
        ("router-tensor", "router holds a tensor that moepress does not know: gate.temperature"),
        ("router-map", "not one linear map"),
        ("dtype", "without quantisation"),
    ],
)
def test_damaged_layer_is_refused(kind: str, words: str) -> None:
    model, layers = build("qwen3_moe")
    damage(kind, layers[1].block)
    with pytest.raises(UnsupportedModel, match=re.escape(words)) as error:
        find_layers(model)
    assert repr(layers[1].name) in str(error.value)


def test_unknown_experts_are_not_overlooked() -> None:
    model, _layers = build("qwen3_moe")
    model.model.layers[1].mlp = Strange()
    with pytest.raises(UnsupportedModel, match="does not know how ModuleList stores its experts"):
        find_layers(model)
    assert adapter_of(model.model.layers[1].mlp) is None


def test_random_second_expert_is_refused() -> None:
    model, layers = build("nllb_moe")
    layers[0].block.router.second_expert_policy = "random"
    with pytest.raises(UnsupportedModel, match="drawn at random"):
        find_layers(model)


def test_unknown_router_has_no_rule() -> None:
    class NewTopKRouter(type(build("qwen3_moe")[1][0].block.gate)):  # type: ignore[misc]
        pass

    _, layers = build("qwen3_moe")
    layers[0].block.gate.__class__ = NewTopKRouter
    assert layers[0].router.rule == "unknown (NewTopKRouter)"


def test_blocks_left_whole_are_named() -> None:
    assert set(left_whole(zoo.build("jetmoe"))) == {f"model.layers.{i}.self_attention" for i in (0, 1)}
    vision = left_whole(zoo.build("ernie4_5_vl_moe"))
    assert vision and all(name.endswith("vision_moe") and "images" in why for name, why in vision.items())


def test_scan_does_not_change_the_model() -> None:
    model = zoo.build("nllb_moe")
    classes = [type(module) for module in model.modules()]
    assert all(refusal is None for _, _, _, refusal in scan(model))
    assert classes == [type(module) for module in model.modules()]


def test_nllb_is_repaired_with_a_warning() -> None:
    """transformers 5.17 to 5.23 runs the experts 0 and 1 only."""
    from moepress.runtime.nllb import native_is_right

    if native_is_right():
        pytest.skip("this transformers routes NLLB rightly")
    model = zoo.build("nllb_moe")
    broken = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="experts 0 and 1 only"):
        layers = find_layers(model)
    for subject, moves in ((broken, False), (model, True)):
        before = logits_of(subject, "nllb_moe")
        with torch.no_grad():
            for layer in layers:
                subject.get_submodule(layer.name).experts["expert_5"].fc2.bias.add_(3.0)
        assert (not torch.equal(logits_of(subject, "nllb_moe"), before)) is moves
