"""The arithmetic about large models counts the operations that a small one of the same kind really takes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from moepress.data import window_batches
from moepress.models.find import find_layers
from moepress.pipeline import press
from moepress.recipe import make_recipe

PLACE = Path(__file__).parents[1] / "benchmarks" / "large_models.py"
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 512,
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["m-smoe", "reap-all", "prune-refit", "auto"])
def test_operations_are_those_of_a_run(method: str) -> None:
    spec = importlib.util.spec_from_file_location("large_models", PLACE)
    assert spec is not None and spec.loader is not None
    large = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(large)
    settings = large.MODELS["Qwen3-235B-A22B"] | SMALL
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).eval()
    text = window_batches(torch.randint(3, 500, (128, 512)), model.config, batch_size=8)
    in_turn = {"refit.method": {"name": "least-squares", "joint_units": 1}} if method in ("prune-refit", "auto") else {}
    expected = large.operations(method, find_layers(model), model.num_parameters(), settings, 128 * 512)
    with FlopCounterMode(display=False) as counted:
        press(model, make_recipe({"method": method, "keep": large.KEEP} | in_turn), lambda: text)
    # `auto` tries fewer plans where its criteria agree.
    assert counted.get_total_flops() == pytest.approx(expected, rel=0.25 if method == "auto" else 0.05)
