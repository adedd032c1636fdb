"""Experts that are called once with all of their tokens compute what each token's experts compute alone."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from moepress.models.find import find_layers
from moepress.models.layer import ExpertBank, Factors
from moepress.runtime.factored import FactoredBank
from moepress.runtime.factors import ExpertFactors
from moepress.runtime.fused import NAME, FusedBank
from moepress.runtime.linear import linear
from moepress.runtime.modules import ModuleBank, together_of
from moepress.runtime.serve import Groups, combined, in_turn, serve, together

from .families import WORKING, noisy
from .squeeze import apart, build, logits, silent, squeeze  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:this version of transformers runs NLLB")
FUSED = {"gate": "qwen3_moe", "bias, transposed": "gpt_oss", "no gate": "nemotron_h"}
MODULES = {"modules": ("switch_transformers", "wi", "wo"), "modules, bias": ("nllb_moe", "fc1", "fc2")}
FACTORED = {"columns": 6, "rows": 6, "columns, none": 0, "rows, none": 0}
KINDS = [*FUSED, *MODULES, *FACTORED]
WAYS = {"in turn": in_turn, "together": together}


def made(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Callable[[], ExpertBank], nn.Module]:
    """Experts as the runtime has them, the same in canonical form, and the module that holds their weights."""
    if kind in FACTORED:
        factors = decomposed(kind.partition(",")[0], FACTORED[kind]).to(dtype)
        bank: Any = FactoredBank(factors, gated)
        return bank, lambda: ExpertBank(activation=gated, **factors.dense()), factors
    name, *maps = MODULES.get(kind, (FUSED.get(kind, ""),))
    model = build(name)
    layer = find_layers(model)[0]
    layer.adapter.write_bank(layer.block, noisy(layer.bank, 1).select([0, 1, 2, 3, 4, 5, 6, 7]))
    experts: Any = layer.block.experts
    experts.to(dtype)
    if not maps:
        return FusedBank(experts), lambda: layer.bank, experts
    return ModuleBank([experts[f"expert_{e}"] for e in range(8)], *maps), lambda: layer.bank, experts


def gated(gate_nF: Tensor | None, up_nF: Tensor) -> Tensor:
    return up_nF.relu() if gate_nF is None else gate_nF.sigmoid() * up_nF


def decomposed(along: str, kept: int) -> ExpertFactors:
    """The first expert keeps nothing of S, the others all that there is, ragged."""
    draw = torch.Generator().manual_seed(0)
    made = ExpertFactors(
        8, 32, 24, Factors(8, along, up=kept, down=kept, gate=kept), ["up", "down"], nn.Parameter(torch.empty(0))
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 3)
        for matrix in made.matrices().values():
            matrix.index.copy_(torch.arange(kept))
            matrix.offsets.copy_(torch.tensor([0, 0, 1, 1, 3, 3, 3, 4, 6]).clamp(max=kept))
    return made


CASES = {
    "none": (0, 2, "any"),
    "one": (1, 2, "any"),
    "many": (13, 3, "any"),
    "one choice": (13, 1, "any"),
    "all to one": (9, 2, "one"),
    "few experts": (9, 2, "few"),
}


def asked(case: str, width: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts (8 and 9 stand for nothing) and weights."""
    tokens, chosen, who = CASES[case]
    draw = torch.Generator().manual_seed(tokens)
    choices = {"any": torch.arange(10), "one": torch.tensor([5]), "few": torch.tensor([0, 7])}[who]
    index_TK = choices[torch.randint(len(choices), (tokens, chosen), generator=draw)]
    x_TD = torch.randn(tokens, width, generator=draw)
    return x_TD, index_TK, torch.rand(tokens, chosen, generator=draw)


def plainly(bank: ExpertBank, x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Token by token and choice by choice."""
    rows = []
    for x_D, index_K, weight_K in zip(x_TD, index_TK, weight_TK, strict=True):
        parts = [w * bank.output(int(e), x_D[None])[0] for e, w in zip(index_K, weight_K, strict=True) if e < 8]
        rows.append(torch.stack(parts).sum(dim=0) if parts else torch.zeros_like(x_D))
    return torch.stack(rows) if rows else torch.zeros_like(x_TD)


def widened(bank: ExpertBank) -> ExpertBank:
    return bank.map(lambda _, tensor: tensor.detach().double())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_each_token_computes_alone(kind: str, way: str) -> None:
    bank, canonical, _ = made(kind)
    exact = widened(canonical())
    for case in CASES:
        x_TD, index_TK, weight_TK = asked(case, exact.up_EFD.shape[2])
        expected = plainly(exact, x_TD.double(), index_TK, weight_TK.double())
        apart_twice = torch.stack([x_TD, x_TD], dim=2)[:, :, 0]  # not contiguous
        for x in (x_TD, apart_twice):
            with torch.no_grad():
                y_TD = WAYS[way](bank, x, *combined(index_TK, weight_TK, 8))
            assert y_TD.shape == x.shape
            assert torch.allclose(y_TD.double(), expected, atol=1e-5), case


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_in_16_bits(kind: str, dtype: torch.dtype) -> None:
    """The bound is a few roundings of this type; those of fp16 are an eighth of those of bf16."""
    bank, canonical, _ = made(kind, dtype)
    exact = widened(canonical())
    bound = 2e-2 if dtype == torch.bfloat16 else 3e-3
    for case in CASES:
        x_TD, index_TK, weight_TK = (
            t.to(dtype) if t.is_floating_point() else t for t in asked(case, exact.up_EFD.shape[2])
        )
        expected = plainly(exact, x_TD.double(), index_TK, weight_TK.double())
        for way in WAYS.values():
            with torch.no_grad():
                y_TD = way(bank, x_TD, *combined(index_TK, weight_TK, 8))
            assert y_TD.dtype == dtype
            assert (y_TD.double() - expected).norm() <= bound * expected.norm(), case


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "none" not in kind])
def test_gradients_are_those_of_the_plain_path(kind: str, way: str) -> None:
    """With duplicates and with choices that stand for nothing, whose rows no grouped product writes."""
    bank, canonical, holder = made(kind)
    x_TD, index_TK, weight_TK = asked("many", canonical().up_EFD.shape[2])
    results = []
    for run in (WAYS[way], one_by_one):
        holder.zero_grad()
        x, weight = x_TD.clone().requires_grad_(), weight_TK.clone().requires_grad_()
        run(
            bank, x, *(combined(index_TK, weight, 8) if run is not one_by_one else (index_TK, weight))
        ).square().sum().backward()
        results.append((x.grad, weight.grad, {name: p.grad for name, p in holder.named_parameters()}))
    (x, weight, own), (x_plain, weight_plain, own_plain) = results
    assert torch.allclose(x, x_plain, atol=1e-4, rtol=1e-4) and torch.allclose(
        weight, weight_plain, atol=1e-4, rtol=1e-4
    )
    compared = 0
    for name, gradient in own.items():
        if gradient is not None and own_plain[name] is not None:
            assert torch.allclose(gradient, own_plain[name], atol=1e-4, rtol=1e-4), name
            compared += int(own_plain[name].abs().max() > 0)
        else:
            assert (gradient is None or not gradient.any()) and own_plain[name] is None, name
    assert compared


def one_by_one(bank: Any, x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
    rows = []
    for x_D, index_K, weight_K in zip(x_TD, index_TK, weight_TK, strict=True):
        parts = [w * bank.one(int(e), x_D[None])[0] for e, w in zip(index_K, weight_K, strict=True) if e < 8]
        rows.append(torch.stack([torch.zeros_like(x_D), *parts]).sum(dim=0))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", ["gate", "modules", "columns"])
def test_an_expert_runs_once_with_the_sum_of_weights(kind: str) -> None:
    bank, _, _ = made(kind)
    x_TD, index_TK, weight_TK = asked("all to one")
    calls: Counter[int] = Counter()

    class Counting:
        experts, sizes = 8, ()

        def one(self, e: int, x_nD: Tensor) -> Tensor:
            calls[e] += len(x_nD)
            return bank.one(e, x_nD)

    with torch.no_grad():
        y_TD = serve(Counting(), x_TD, index_TK, weight_TK)  # type: ignore[arg-type]
        once = serve(bank, x_TD, index_TK[:, :1], weight_TK.sum(dim=1, keepdim=True))
    assert calls == {5: len(x_TD)}
    assert torch.allclose(y_TD, once, atol=1e-6)


@pytest.mark.parametrize("kind", ["gate", "modules, bias", "columns", "rows"])
def test_together_asks_the_device_for_nothing(kind: str) -> None:
    """On tensors without values, whatever wants a number from them is an error."""
    bank, _, _ = made(kind, torch.bfloat16)
    x_TD, index_TK, weight_TK = (t.bfloat16() if t.is_floating_point() else t for t in asked("many"))
    with torch.no_grad():
        together(bank, x_TD, *combined(index_TK, weight_TK, 8))  # offsets are read once
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        x, index, weight = (mode.from_tensor(t) for t in (x_TD, index_TK, weight_TK))
        assert together(bank, x, *combined(index, weight, 8)).shape == x_TD.shape
        with pytest.raises(DynamicOutputShapeException):
            in_turn(bank, x, *combined(index, weight, 8))


@pytest.mark.parametrize(("kind", "whole"), [("gate", True), ("modules", True), ("columns", False)])
def test_torch_compile_takes_it(kind: str, whole: bool) -> None:
    """Without a break, but for decomposed experts."""
    bank, _, _ = made(kind, torch.bfloat16)
    x_TD, index_TK, weight_TK = (t.bfloat16() if t.is_floating_point() else t for t in asked("many"))
    run = torch.compile(lambda *given: serve(bank, *given), fullgraph=whole, backend="eager", dynamic=False)
    with torch.no_grad():
        assert torch.equal(run(x_TD, index_TK, weight_TK), together(bank, x_TD, *combined(index_TK, weight_TK, 8)))


def test_columns_that_lie_evenly_are_not_copied() -> None:
    factors = decomposed("columns", 0)
    packed_ECO, index_EC = factors.matrix("up").even()
    assert packed_ECO.data_ptr() == factors.matrix("up").packed_Px.data_ptr() and index_EC.shape == (8, 0)


def test_experts_that_lie_side_by_side_are_not_copied() -> None:
    bank, _, experts = made("modules")
    pieces = torch.stack([experts[f"expert_{e}"].wi.weight.data for e in range(8)])
    for e in range(8):
        experts[f"expert_{e}"].wi.weight.data = pieces[e]
    weights = [module.wi.weight for module in bank.modules]
    with torch.no_grad():
        assert together_of(weights).data_ptr() == pieces.data_ptr()
        assert torch.equal(together_of(weights), pieces)
        assert together_of(weights[::-1]).data_ptr() != pieces.data_ptr()
    together_of(weights).sum().backward()
    assert all(torch.equal(weight.grad, torch.ones_like(weight)) for weight in weights)


def test_offsets_are_read_again_when_they_change() -> None:
    factors = decomposed("columns", 6)
    up = factors.matrix("up")
    before = up.kept_counts(), up.even()[1].clone()
    up.offsets.copy_(torch.tensor([0, 6, 6, 6, 6, 6, 6, 6, 6]))
    assert up.kept_counts() == [6, 0, 0, 0, 0, 0, 0, 0] != before[0]
    assert not torch.equal(up.even()[1], before[1])


def test_hooks_and_adapters_of_experts_are_minded() -> None:
    bank, _, experts = made("modules")
    x_TD, index_TK, weight_TK = asked("one choice")
    seen: list[int] = []
    busy = int(index_TK[index_TK < 8][0])
    expert = experts[f"expert_{busy}"]
    handle = expert.wi.register_forward_hook(lambda *_: seen.append(busy))
    with torch.no_grad():
        before = serve(bank, x_TD, index_TK, weight_TK)
        assert seen == [busy] and bank.sizes == ()
        handle.remove()
        assert bank.sizes == (24, 32)
        expert.wo.__class__ = Negative  # as adapters do
        assert bank.sizes == ()
        after = serve(bank, x_TD, index_TK, weight_TK)
    changed_T = index_TK[:, 0] == busy
    assert changed_T.any() and torch.allclose(after[changed_T], -before[changed_T], atol=1e-6)


class Negative(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return -super().forward(input)


def test_the_product_is_that_of_torch() -> None:
    draw = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(*shape, generator=draw) for shape in ((7, 33), (19, 33), (19,)))
    with torch.no_grad():
        for a, b in ((x, w), (x[:, ::1].T.contiguous().T, w.T.contiguous().T), (x[::2], w)):
            assert torch.allclose(linear(a, b, bias), nn.functional.linear(a, b, bias), atol=1e-5)
        assert linear(x[:0], w).shape == (0, 19) and linear(x, w[:0]).shape == (7, 0)
    trained = w.clone().requires_grad_()
    linear(x, trained).sum().backward()
    assert trained.grad is not None


def test_groups_of_counts() -> None:
    groups = Groups.of([2, 0, 3], torch.device("cpu"))
    assert groups.ends_E.tolist() == [2, 2, 5] and groups.expert_n.tolist() == [0, 0, 2, 2, 2]


SETTABLE = ["qwen3_moe", "gpt_oss", "nemotron_h", "deepseek_v3", "ernie4_5_moe", "longcat_flash", "zaya", "inkling"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SETTABLE else pytest.mark.slow) for n in WORKING])
@pytest.mark.parametrize("router", ["redirect", "none"])
def test_as_an_experts_implementation(name: str, router: str) -> None:
    """In transformers' own sense, for models that are compact and for those that are not."""
    model: Any = build(name)
    if router == "redirect":
        squeeze(model, "redirect")
    twin = copy.deepcopy(model)
    model.set_experts_implementation("eager")
    twin.set_experts_implementation(NAME)
    if not any(implementation == NAME for implementation in twin.get_experts_implementation().values()):
        pytest.skip("this family has no choice of implementations")
    a, b = logits(model, name), logits(twin, name)
    assert apart(a, b) <= 1e-5 * max(1.0, float(a.abs().max()))


def test_it_is_known_once_moepress_is_imported() -> None:
    check = f"""
import moepress
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
small = dict(hidden_size=8, num_hidden_layers=1, num_experts=2, vocab_size=8, num_attention_heads=1, head_dim=8,
             num_key_value_heads=1, moe_intermediate_size=8, intermediate_size=8)
model = Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(**small), experts_implementation="{NAME}")
assert model.config._experts_implementation == "{NAME}"
"""
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-1500:]
