"""The paper's sizes and operations, and the count of operations against torch's."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import moepress
from moepress.cli.main import app
from moepress.data import window_batches
from moepress.errors import MoepressError
from moepress.paper.flops import forward_flops
from moepress.paper.models import MODELS, Batch, on_meta
from moepress.paper.sizes import SizeRow
from moepress.pipeline import press
from moepress.recipe import make_recipe

from . import zoo

MILLIONS = {
    ("switch-base-32", "full"): (1978.5, 1978.5),
    ("switch-base-32", "m-smoe"): (732.8, 732.8),
    ("switch-base-32", "c-smoe"): (570.2, 2065.0),
    ("switch-base-32", "mc-smoe"): (380.7, 754.4),
    ("t5-base", "full"): (222.9, 222.9),
    ("fairseq-dense-125m", "full"): (124.4, 124.4),
    ("fairseq-moe-15b", "full"): (14605.7, 14605.7),
    ("fairseq-moe-15b", "m-smoe"): (551.8, 551.8),
    ("fairseq-moe-15b", "mc-smoe"): (167.7, 575.3),
}


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], SizeRow]:
    return {(row.model, row.method): row for row in moepress.paper_sizes()}


@pytest.mark.parametrize("which", MILLIONS, ids="-".join)
def test_sizes_are_the_paper_s(rows: dict[tuple[str, str], SizeRow], which: tuple[str, str]) -> None:
    row = rows[which]
    stored, whole = MILLIONS[which]
    assert row.parameters / 1e6 == pytest.approx(stored, abs=0.1)
    assert row.whole_parameters / 1e6 == pytest.approx(whole, abs=0.1)
    assert row.bytes >= 2 * row.parameters
    number, unit = float(row.paper_parameters[:-1]), row.paper_parameters[-1]
    assert row.parameters == pytest.approx(number * {"M": 1e6, "B": 1e9}[unit], rel=0.03)


def test_bytes_follow_the_type(rows: dict[tuple[str, str], SizeRow]) -> None:
    own = rows["switch-base-32", "full"].parameters
    assert moepress.paper_sizes(["switch-base-32"], dtype="float32")[0].bytes >= 4 * own


def test_the_length_of_the_decoders_texts(rows: dict[tuple[str, str], SizeRow]) -> None:
    """One length explains the paper's figures for the dense model and for MC-SMoE. What it prints for the full model
    and for M-SMoE is the dense model's, though two experts are run for each token."""
    dense, full, merged, both = (
        rows[model, method]
        for model, method in (
            ("fairseq-dense-125m", "full"),
            ("fairseq-moe-15b", "full"),
            ("fairseq-moe-15b", "m-smoe"),
            ("fairseq-moe-15b", "mc-smoe"),
        )
    )
    assert dense.paper_tokens == pytest.approx(both.paper_tokens, rel=0.015)
    model, shape = on_meta(MODELS["fairseq-dense-125m"], torch.bfloat16), Batch(64, 307)
    assert forward_flops(model, shape) / 1e12 == pytest.approx(5.08, rel=0.01)
    assert full.paper_tokens == merged.paper_tokens and full.paper_tokens < 0.85 * dense.paper_tokens
    assert full.paper_tflops == dense.paper_tflops and full.tflops > 1.2 * dense.tflops
    solved = Batch(64, round(dense.paper_tokens))
    assert forward_flops(model, solved) / 1e12 == pytest.approx(dense.paper_tflops, rel=0.002)


@pytest.mark.parametrize("method", ["full", "m-smoe", "c-smoe", "mc-smoe"])
def test_operations_are_the_paper_s(rows: dict[tuple[str, str], SizeRow], method: str) -> None:
    row = rows["switch-base-32", method]
    assert row.tflops == pytest.approx(row.paper_tflops, rel=0.03)


@pytest.fixture(autouse=True)
def no_rows_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU computes beside, so that it sees fewer shapes, does not count."""
    monkeypatch.setattr("moepress.runtime.serve.evened", lambda token_n: token_n)


def counted(model: Any, **inputs: Any) -> int:
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    return counter.get_total_flops()


def test_operations_of_a_decoder_are_those_that_torch_counts() -> None:
    model, shape = zoo.build("fairseq_moe"), Batch(3, 16)
    ids = torch.randint(3, 80, (shape.samples, shape.source))
    model.set_attn_implementation("eager")  # torch does not count its own attention on a CPU
    assert forward_flops(model, shape) == counted(model, input_ids=ids, attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize("method", [None, "m-smoe", "c-smoe"])
def test_operations_are_those_that_torch_counts(method: str | None) -> None:
    name, shape = "switch_transformers", Batch(3, 16, 7)
    plain, model = zoo.build(name), zoo.build(name)
    model.config.decoder_start_token_id = 0
    for module in model.modules():
        if hasattr(module, "expert_capacity"):
            module.expert_capacity = 1000
    inputs = {
        "input_ids": torch.randint(3, 80, (shape.samples, shape.source)),
        "decoder_input_ids": torch.randint(3, 80, (shape.samples, shape.target)),
    }
    specs = {}
    if method:
        given: dict[str, Any] = {"decompose.rank": 4, "decompose.ratio": 1} if method == "c-smoe" else {"keep": 4}
        text = lambda: window_batches(inputs["input_ids"], model.config)  # noqa: E731
        specs = press(model, make_recipe({"method": method} | given), text).specs
    assert forward_flops(plain, shape, specs) == counted(model, **inputs)


def test_choices_without_room_cost_nothing() -> None:
    model, shape = zoo.build("switch_transformers"), Batch(2, 8, 4)
    none, half, whole = (forward_flops(model, shape, served=share) for share in (0.0, 0.5, 1.0))
    assert 0 < none < half < whole and half == pytest.approx((none + whole) / 2)


def test_the_command_shows_the_same(rows: dict[tuple[str, str], SizeRow]) -> None:
    shown = CliRunner().invoke(app, ["paper", "sizes", "--model", "switch-base-32", "--json"])
    assert json.loads(shown.stdout) == [row.to_dict() for row in rows.values() if row.model == "switch-base-32"]
    table = CliRunner().invoke(app, ["paper", "sizes", "--model", "switch-base-32"], env={"COLUMNS": "160"})
    assert "380.7 M" in table.stdout and "381M" in table.stdout and "754" in table.stdout


@pytest.mark.parametrize(
    ("given", "words"), [({"models": ["switch-base-23"]}, "did you mean"), ({"dtype": "int4"}, "not a type")]
)
def test_what_is_unknown_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(MoepressError, match=words):
        moepress.paper_sizes(**given)
