"""The factored matrices themselves: what they compute, in every form, size and precision, and their gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from moepress.models.layer import Factors
from moepress.runtime.factored import FactoredBank
from moepress.runtime.factors import FORMS, ExpertFactors, FactoredMatrix
from moepress.runtime.serve import Groups, serve

E, D, F, R = 4, 32, 24, 8
KEPT = [[], [3], [0, 5, 7, 23], [1, 2, 4, 8, 16, 20, 21, 22, 23]]


def matrix(along: str, dtype: torch.dtype = torch.float32, kept: list[list[int]] | None = None) -> FactoredMatrix:
    kept = KEPT if kept is None else kept
    draw = torch.Generator().manual_seed(0)
    like = torch.nn.Parameter(torch.empty(0, dtype=dtype))
    made = FORMS[along](E, F, D, R, sum(map(len, kept)), like)
    thin, packed = made.thin_ERx.shape[2], made.packed_Px.shape[1]
    made.fill(
        torch.randn(E, R, thin, generator=draw) / 4,
        torch.randn(E, R, packed, generator=draw) / 4,
        [torch.randn(len(each), packed, generator=draw) / 4 for each in kept],
        [torch.tensor(each, dtype=torch.int32) for each in kept],
    )
    return made


def dense(made: FactoredMatrix) -> Tensor:
    """UV + S by hand, in float64."""
    thin, packed = made.thin_ERx.double(), made.packed_Px.double()
    whole = []
    for e in range(E):
        own = packed[made.packed_of(e)]
        columns = isinstance(made, FORMS["columns"])
        w = own[:R].T @ thin[e] if columns else thin[e].T @ own[:R]
        for row, place in zip(own[R:], made.kept_of(e).tolist(), strict=True):
            if columns:
                w[:, place] += row
            else:
                w[place] += row
        whole.append(w)
    return torch.stack(whole)


WAYS = ["in turn", "grouped"]


def multiplied(made: FactoredMatrix, x_nI: Tensor, counts: list[int], way: str) -> Tensor:
    """Tokens in the order of their experts, of which expert e has `counts[e]`."""
    if way == "grouped":
        return made.grouped(x_nI, Groups.of(counts, x_nI.device))
    return torch.cat([made.one(e, part) for e, part in enumerate(x_nI.split(counts))])


COUNTS = [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 17, 0, 0], [3, 1, 0, 5], [5, 4, 3, 2]]


@pytest.mark.parametrize("along", FORMS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kept", [KEPT, [[]] * 4, [list(range(24))] * 4], ids=["some", "none", "all"])
def test_it_computes_what_uv_plus_s_computes(along: str, counts: list[int], way: str, kept: list[list[int]]) -> None:
    made = matrix(along, kept=kept)
    x_nI = torch.randn(sum(counts), D, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        if way == "grouped" and len(x_nI) == 0:
            pytest.skip("grouped products are for tokens that exist")
        y_nO = multiplied(made, x_nI, counts, way)
        parts = zip(x_nI.double().split(counts), dense(made), strict=True)
        expected = torch.cat([part @ w_OI.T for part, w_OI in parts])
    assert y_nO.shape == (sum(counts), F)
    assert torch.allclose(y_nO.double(), expected, atol=1e-5)
    assert torch.allclose(made.dense().double(), dense(made), atol=1e-6)


@pytest.mark.parametrize("along", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits(along: str, dtype: torch.dtype) -> None:
    made, counts = matrix(along, dtype), [3, 1, 0, 5]
    x_nI = torch.randn(9, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        expected = torch.cat([p @ w.T for p, w in zip(x_nI.double().split(counts), dense(made), strict=True)])
        bound = 2e-2 if dtype == torch.bfloat16 else 3e-3
        for way in WAYS:
            y_nO = multiplied(made, x_nI, counts, way)
            assert y_nO.dtype == dtype
            assert (y_nO.double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("along", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_product(along: str, way: str) -> None:
    made, counts = matrix(along), [3, 1, 0, 5]
    x_nI = torch.randn(9, D, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y_nO = multiplied(made, x_nI, counts, way)
    y_nO.square().sum().backward()
    other, again = copy.deepcopy(made), x_nI.detach().clone().requires_grad_()
    other.zero_grad()
    w_EOI = other.dense()
    torch.cat([p @ w.T for p, w in zip(again.split(counts), w_EOI, strict=True)]).square().sum().backward()
    assert x_nI.grad is not None and again.grad is not None
    assert torch.allclose(x_nI.grad, again.grad, atol=1e-4)
    for name, parameter in made.named_parameters():
        expected = other.get_parameter(name).grad
        assert parameter.grad is not None and expected is not None and expected.abs().max() > 0
        assert torch.allclose(parameter.grad, expected, atol=1e-4), name


def experts(gate: bool) -> ExpertFactors:
    shape = Factors(R, "columns", up=5, down=0, gate=7 if gate else None)
    like = torch.nn.Parameter(torch.empty(0))
    made = ExpertFactors(E, D, F, shape, ["up", "down"], like)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 4)
        for m in made.matrices().values():
            m.index.copy_(torch.arange(len(m.index)))
            m.offsets[1:] = len(m.index)  # the first expert has them all
    return made


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 13])
@pytest.mark.parametrize("one", [False, True], ids=["spread", "all to one"])
def test_tokens_find_their_experts(gate: bool, tokens: int, one: bool) -> None:
    """Also indices that stand for no weights, and experts that nobody asks."""
    made, chosen = experts(gate), 2
    draw = torch.Generator().manual_seed(tokens)
    x_TD = torch.randn(tokens, D, generator=draw)
    index_TK = torch.full((tokens, chosen), 2) if one else torch.randint(0, E + 1, (tokens, chosen), generator=draw)
    weight_TK = torch.rand(tokens, chosen, generator=draw)

    def activate(gate_nF: Tensor | None, up_nF: Tensor) -> Tensor:
        return torch.relu(up_nF) if gate_nF is None else torch.relu(gate_nF) * up_nF

    with torch.no_grad():
        output_TD = serve(FactoredBank(made, activate), x_TD, index_TK, weight_TK)
        dense, expected = made.dense(), torch.zeros(tokens, D)
        for t in range(tokens):
            for k in range(chosen):
                e = int(index_TK[t, k])
                if e < E:
                    up_F = dense["up_EFD"][e] @ x_TD[t] + dense["up_bias_EF"][e]
                    gate_F = dense["gate_EFD"][e] @ x_TD[t] if gate else None
                    y_D = dense["down_EDF"][e] @ activate(gate_F, up_F) + dense["down_bias_ED"][e]
                    expected[t] += weight_TK[t, k] * y_D
    assert torch.allclose(output_TD, expected, atol=1e-5)
