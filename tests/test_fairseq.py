"""The fairseq language model, against transformers' own ports of its parts, and compressed for real."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, NllbMoeConfig, XGLMConfig, XGLMForCausalLM
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeTop2Router

import moepress
from moepress.checkpoint.load import load_model
from moepress.errors import MoepressError
from moepress.fairseq.configuration import FairseqMoeConfig
from moepress.fairseq.modeling import FairseqMoeForCausalLM, FairseqMoeSparseMLP, FairseqMoeTop2Router

SIZES = {"vocab_size": 96, "num_layers": 4, "max_position_embeddings": 64}


def config(**given: Any) -> FairseqMoeConfig:
    shape = SIZES | {"hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "num_experts": 8}
    return FairseqMoeConfig(**shape | given)


def build(**given: Any) -> FairseqMoeForCausalLM:
    torch.manual_seed(0)
    return FairseqMoeForCausalLM(config(**given)).eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(4, 96, shape, generator=torch.Generator().manual_seed(1))


# ---- against transformers --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> tuple[FairseqMoeForCausalLM, XGLMForCausalLM]:
    """A dense model, and the same weights in XGLM, a decoder of fairseq that transformers has."""
    ours = build(sparse_step=0)
    theirs = XGLMForCausalLM(XGLMConfig(d_model=32, ffn_dim=48, attention_heads=4, **SIZES)).eval()
    named = {k.replace("decoder.", "model.").replace(".ffn.", "."): v for k, v in ours.state_dict().items()}
    theirs.load_state_dict(named)
    return ours, theirs


@torch.no_grad()
def test_a_dense_model_is_xglm(pair: tuple[FairseqMoeForCausalLM, XGLMForCausalLM]) -> None:
    ours, theirs = pair
    ids = tokens(3, 20)
    logits = ours(ids).logits
    assert logits.std() > 0.05
    assert torch.allclose(logits, theirs(ids).logits, atol=1e-6)  # sums in another order
    both = [model(ids, labels=ids).loss for model in pair]
    assert torch.allclose(both[0], both[1], atol=1e-6)
    at = torch.arange(5, 25)[None].expand(3, -1)
    assert torch.allclose(ours(ids, position_ids=at).logits, theirs(ids, position_ids=at).logits, atol=1e-6)
    written = [model.generate(ids, max_new_tokens=12, do_sample=False) for model in pair]
    assert torch.equal(written[0], written[1])


@torch.no_grad()
@pytest.mark.parametrize(
    ("given", "fraction", "capacity"),
    [
        ({}, 1.0, None),
        ({"drop_tokens": True}, -1.0, None),
        ({"drop_tokens": True, "expert_capacity": 3}, -1.0, 3),
        ({"drop_tokens": True, "moe_eval_capacity_token_fraction": 0.25}, 0.25, None),
        ({"drop_tokens": True, "normalize_router_prob_before_dropping": True}, -1.0, None),
        ({"drop_tokens": True, "batch_prioritized_routing": True}, -1.0, None),
    ],
    ids=str,
)
def test_the_router_is_nllb_s(given: dict[str, Any], fraction: float, capacity: int | None) -> None:
    own = FairseqMoeTop2Router(config(router_bias=True, **given)).eval()
    rest = {n: v for n, v in given.items() if n.startswith(("normalize", "batch"))}
    dropped = []
    for count in (40, 8, 64):  # NLLB's router keeps the capacity of its first call, so that each has one of its own
        theirs = NllbMoeTop2Router(
            NllbMoeConfig(d_model=32, num_experts=8, router_bias=True, router_ignore_padding_tokens=True, **rest)
        ).eval()
        theirs.expert_capacity, theirs.moe_eval_capacity_token_fraction = capacity, fraction
        theirs.load_state_dict(own.state_dict())
        x_TD = torch.randn(count, 32, generator=torch.Generator().manual_seed(count))
        assert all(torch.equal(a, b) for a, b in zip(own(x_TD), theirs(x_TD), strict=True))
        dropped.append(bool(((own(x_TD)[1] > 0).sum(1) < 2).any()))
        assert own.expert_capacity == capacity
    assert any(dropped) == bool(given)


@torch.no_grad()
def test_a_sparse_layer_by_hand() -> None:
    torch.manual_seed(0)
    block = FairseqMoeSparseMLP(config()).eval()
    x_BLD = torch.randn(2, 5, 32)
    expected = torch.zeros_like(x_BLD)
    for b in range(2):
        for t in range(5):
            x_D = x_BLD[b, t]
            top = block.router.classifier(x_D).softmax(-1).topk(2)
            for gate, e in zip(top.values / top.values.sum(), top.indices.tolist(), strict=True):
                expert = block.experts[f"expert_{e}"]
                hidden = torch.nn.functional.gelu(x_D @ expert.fc1.weight.T + expert.fc1.bias)
                expected[b, t] += 0.8 * gate * (hidden @ expert.fc2.weight.T + expert.fc2.bias)
    assert torch.allclose(block(x_BLD), expected, atol=1e-6)


# ---- positions, cache, loading ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_positions_are_fairseq_s() -> None:
    model = build()
    ids = torch.cat([torch.ones(1, 3, dtype=torch.long), tokens(1, 4)], dim=1)
    rows = model.decoder.positions(torch.zeros(1, 7, 32), ids, None, 0)
    assert rows.tolist() == [[1, 1, 1, 2, 3, 4, 5]]
    row = model.decoder.embed_positions(torch.tensor([[1, 4]]))[0]
    angles = [4 * math.exp(-i * math.log(10000) / 15) for i in range(16)]
    assert torch.allclose(row[1], torch.tensor([*map(math.sin, angles), *map(math.cos, angles)]), atol=1e-6)
    assert (row[0] == 0).all()
    assert model(tokens(1, 70)).logits.isfinite().all()  # beyond those that were made beforehand


@torch.no_grad()
def test_padding_and_cache_change_nothing() -> None:
    model, ids = build(), tokens(2, 9)
    padded = torch.cat([torch.ones(2, 4, dtype=torch.long), ids], dim=1)
    mask = (padded != 1).long()
    plain = model(ids).logits
    assert torch.allclose(model(padded, attention_mask=mask).logits[:, 4:], plain, atol=1e-6)
    written = model.generate(ids, max_new_tokens=10, do_sample=False)
    assert torch.equal(written, model.generate(ids, max_new_tokens=10, do_sample=False, use_cache=False))
    again = model.generate(padded, attention_mask=mask, max_new_tokens=10, do_sample=False)
    assert torch.equal(written, again[:, 4:])
    seen = model(ids, output_router_logits=True, output_hidden_states=True)
    assert len(seen.router_logits) == 2 and len(seen.hidden_states) == 5


ORDERS = [
    "import moepress; import transformers.models.nllb_moe.modeling_nllb_moe; "  # which imports the Auto classes halfway
    "from transformers import AutoModelForCausalLM as A",
    "from transformers import AutoModelForCausalLM as A; import moepress",
]


@pytest.mark.parametrize("order", ORDERS, ids=["before", "after"])
def test_the_auto_classes_know_it(order: str, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    code = (
        f"{order}; model = A.from_pretrained({str(tmp_path)!r}); print(type(model).__name__, model.lm_head.weight is "
    )
    code += "model.decoder.embed_tokens.weight)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "FairseqMoeForCausalLM True", run.stderr[-2000:]


def test_a_port_s_files_load(tmp_path: Path) -> None:
    """Its names, its buffers that carry nothing, its keys."""
    model = build()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {"decoder.layers.0.ffn.fc1.bias", "decoder.layers.1.ffn.experts.expert_7.fc2.weight"} <= set(tensors)
    assert {"decoder.layers.1.ffn.router.classifier.weight", "decoder.layer_norm.bias"} <= set(tensors)
    tensors["decoder.embed_positions._float_tensor"] = torch.zeros(1)
    tensors["decoder.layers.0.self_attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    same = loaded(tokens(1, 6)).logits, model(tokens(1, 6)).logits
    assert torch.allclose(*same, atol=1e-6)  # weights that stay in the file may lie at an odd address
    known = AutoConfig.for_model("fairseq_moe")
    assert (known.num_experts, known.sparse_step, known.hidden_size, known.moe_token_dropout) == (512, 2, 768, 0.2)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    build().config.save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(MoepressError, match="safetensors"):
        load_model(tmp_path)


# ---- compressed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("m-smoe", {"keep": 4}),
        ("mc-smoe", {"keep": 4, "decompose.rank": 4}),
        ("frequency-pruning", {"keep": 8, "format": "vanilla"}),
    ],
)
def test_64_experts_are_compressed_saved_loaded_and_write(method: str, given: dict[str, Any], tmp_path: Path) -> None:
    """Each layer merged or pruned, none skipped, as in the paper."""
    model = build(num_experts=64)
    model.save_pretrained(tmp_path / "full")
    save_file({"ids": tokens(8, 32)}, tmp_path / "text.safetensors")
    done = moepress.compress(
        tmp_path / "full",
        tmp_path / "small",
        method=method,
        calibration=str(tmp_path / "text.safetensors"),
        **given,
    )
    vanilla = given.get("format") == "vanilla"
    small: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    counts = [layer.physical for layer in done.outcome.plan.layers]
    assert sum(counts) == 2 * given["keep"] and len(counts) == 2
    assert done.after.bytes < 0.5 * done.before.bytes
    assert (tmp_path / "small" / "model.safetensors").stat().st_size < 1.1 * done.after.bytes + 40_000
    rows = [small.decoder.layers[i].ffn.router.classifier.weight.shape[0] for i in (1, 3)]
    assert rows == ([8, 8] if vanilla else [64, 64])
    assert small.config.num_experts == (8 if vanilla else 64)
    ids = tokens(2, 8)
    with torch.no_grad():
        logits = small(ids).logits
    assert logits.isfinite().all() and not torch.allclose(logits, model(ids).logits, atol=1e-4)
    written = small.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(written, small.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False))
    assert json.loads((tmp_path / "small" / "config.json").read_text())["model_type"] == "fairseq_moe"


def test_merging_equal_experts_costs_nothing() -> None:
    """Experts that are copies of four become these four, whoever the router sends a token to."""
    model = build(num_experts=64)
    for i in (1, 3):
        experts = model.decoder.layers[i].ffn.experts
        for e in range(4, 64):
            experts[f"expert_{e}"].load_state_dict(experts[f"expert_{e % 4}"].state_dict())
    ids = tokens(8, 32)
    with torch.no_grad():
        before = model(ids).logits
    from moepress.data import window_batches
    from moepress.pipeline import press
    from moepress.recipe import make_recipe

    given = {"method": "m-smoe", "keep": 4, "plan.budget": "uniform", "plan.similarity": "expert-weight"}
    given |= {"plan.grouping": "hierarchical"}
    press(model, make_recipe(given), lambda: window_batches(ids, model.config))
    assert [len([n for n in model.decoder.layers[i].ffn.experts if n.startswith("expert_")]) for i in (1, 3)] == [4, 4]
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, before, atol=1e-5)
