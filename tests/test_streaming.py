"""A folder is compressed layer by layer, without the whole model in memory; what comes out is the same to the bit."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import moepress
from moepress.checkpoint.load import load_model
from moepress.checkpoint.paging import PagedWeights
from moepress.errors import MoepressError
from moepress.models.find import find_layers
from moepress.models.walk import walk
from moepress.models.weights import Weights

from .families import WORKING, calibration
from .squeeze import build, silent  # noqa: F401

OVERWRITTEN = {"zaya": "balancing_biases"}
"""Loaded tensors over which transformers writes when it initialises what is not in the files."""


def aligned(model: PreTrainedModel) -> PreTrainedModel:
    """Weights where torch would put them. Those of a small file stay where they are in it, and products of numbers at
    odd addresses are rounded otherwise."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()
    return model


@pytest.mark.parametrize(
    "name, fused",
    [*((name, False) for name in WORKING), *((name, True) for name in ("qwen3_moe", "mixtral", "llama4", "jetmoe"))],
)
def test_every_family_is_read_as_it_is_loaded(name: str, fused: bool, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path, save_original_format=not fused)
    whole, paged = aligned(load_model(tmp_path)), load_model(tmp_path, paged=True)
    weights = Weights.of(paged)
    assert isinstance(weights, PagedWeights)
    assert str(paged.config) == str(whole.config)
    names = [name for name in paged.state_dict() if weights.known(name)]
    weights.load(names)
    for key, tensor in whole.state_dict().items():
        if not key.endswith(OVERWRITTEN.get(name, "-")):
            read = paged.state_dict()[key]
            assert read.dtype == tensor.dtype and torch.equal(read, tensor), key
    weights.drop(names)
    if name in OVERWRITTEN:
        return
    batches = [calibration(whole, name, 0), calibration(whole, name, 1)]
    seen = [
        [y for visit in walk(m, batches, layers=find_layers(m)) for _, y in visit.batches_with_output()]
        for m in (whole, paged)
    ]
    assert len(seen[0]) == len(seen[1]) and all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert all(tensor.is_meta for tensor in paged.parameters())


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def windows(folder: Path, length: int = 12) -> str:
    """Random text in two domains."""
    generator = torch.Generator().manual_seed(1)
    ids = {name: torch.randint(3, 90, (5, length), generator=generator) for name in ("a", "b")}
    save_file(ids, folder / "text.safetensors")
    return str(folder / "text.safetensors")


SPLIT = ("ernie4_5_vl_moe",)
"""Some tensors of the files are shared between modules, and saved in parts once that is impossible."""
METHODS: dict[str, dict[str, Any]] = {
    "m-smoe": {"method": "m-smoe"},
    "paper": {"method": "m-smoe", "preset": "paper"},
    "vanilla": {"method": "reap", "format": "vanilla"},
    "sequential": {"method": "reap", "sequential": True},
    "refit": {"method": "prune-refit"},
    "auto": {"method": "auto"},
}
CASES = [
    *(("qwen3_moe", method) for method in METHODS),
    *((name, "m-smoe") for name in ("switch_transformers", "gpt_oss", "deepseek_v3", "llama4", "ernie4_5_vl_moe")),
    *((name, "refit") for name in ("mixtral", "switch_transformers")),
]
OFTEN = [
    *(("qwen3_moe", method) for method in ("m-smoe", "vanilla", "refit")),
    *((name, "m-smoe") for name in ("switch_transformers", "gpt_oss", "ernie4_5_vl_moe")),
]
"""The rest takes its time."""


@pytest.mark.parametrize(
    "name, method, dtype",
    [
        pytest.param(*case, dtype, marks=[] if case in OFTEN and dtype == torch.bfloat16 else pytest.mark.slow)
        for case in CASES
        for dtype in (torch.bfloat16, torch.float32)
    ],
)
def test_the_output_is_that_of_a_model_in_memory(name: str, method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = build(name).to(dtype)
    if model.config.is_encoder_decoder:
        model.config.decoder_start_token_id = 0
    model.save_pretrained(tmp_path / "model")
    options = {"keep": 0.5, "calibration": windows(tmp_path), "calibration.batch_size": 2, **METHODS[method]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moepress.compress(tmp_path / "model", tmp_path / "streamed", **options)
        moepress.compress(aligned(load_model(tmp_path / "model")), tmp_path / "whole", **options)
    ours, theirs = tensors_of(tmp_path / "streamed"), tensors_of(tmp_path / "whole")
    if name in SPLIT:
        ours, theirs = (load_model(tmp_path / out).state_dict() for out in ("streamed", "whole"))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        copied = key.endswith(("correction_bias", "gate.weight"))  # as in the file; transformers loads float32
        assert ours[key].dtype == tensor.dtype or copied, key
        assert torch.equal(ours[key].to(tensor.dtype), tensor), key
    for file in ("config.json", "generation_config.json"):
        if (tmp_path / "whole" / file).exists():
            assert (tmp_path / "streamed" / file).read_text() == (tmp_path / "whole" / file).read_text()
    load_model(tmp_path / "streamed")
    assert moepress.verify(tmp_path / "streamed").whole
    assert sorted(f.name for f in tmp_path.iterdir() if f.name.startswith(".")) == []


def test_a_memory_budget_is_kept_or_refused(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path / "model")
    text = windows(tmp_path)
    with pytest.raises(MoepressError, match=r"needs about ([\d.]+) (MB|GB) of memory and may use 1 MB") as raised:
        moepress.compress(tmp_path / "model", tmp_path / "out", keep=0.5, calibration=text, memory="1MB")
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".out*"))
    words = str(raised.value).split()
    least = float(words[3]) * {"MB": 1e6, "GB": 1e9}[words[4]] * 1.02  # the process may have grown since
    for name, memory in (("tight", int(least)), ("wide", "64GB")):
        result = moepress.compress(tmp_path / "model", tmp_path / name, keep=0.5, calibration=text, memory=memory)
        assert result.outcome.recipe.align.memory == "2GB"
    assert all(torch.equal(t, tensors_of(tmp_path / "wide")[k]) for k, t in tensors_of(tmp_path / "tight").items())


def with_a_prediction_head(path: Path) -> dict[str, Tensor]:
    """A model with a layer of its own for multi-token prediction, as DeepSeek ships it; what transformers ignores."""
    model = build("deepseek_v3")
    model.config.num_nextn_predict_layers = 1
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    head = {
        name.replace("layers.1.", "layers.7."): tensor + 1 for name, tensor in tensors.items() if "layers.1.mlp" in name
    } | {"model.layers.7.eh_proj.weight": torch.ones(3, 3)}
    assert any(".experts." in name for name in head)
    save_file(tensors | head, path / "model.safetensors", {"format": "pt"})
    return head


def test_a_prediction_head_is_kept_or_left_out(tmp_path: Path) -> None:
    head = with_a_prediction_head(tmp_path / "model")
    options = {"keep": 6, "calibration": windows(tmp_path)}
    moepress.compress(tmp_path / "model", tmp_path / "compact", **options)
    written = tensors_of(tmp_path / "compact")
    assert all(torch.equal(written[name], tensor) for name, tensor in head.items())
    assert json.loads((tmp_path / "compact" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    result = moepress.compress(tmp_path / "model", tmp_path / "vanilla", method="reap", format="vanilla", **options)
    assert not head.keys() & tensors_of(tmp_path / "vanilla").keys()
    assert json.loads((tmp_path / "vanilla" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert any("multi-token prediction" in note for note in result.outcome.notes)


def test_large_layers_are_files_of_their_own(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path / "model", max_shard_size="40KB")
    options = {"keep": 0.5, "calibration": windows(tmp_path)}
    moepress.compress(tmp_path / "model", tmp_path / "one", **options)
    moepress.compress(tmp_path / "model", tmp_path / "many", max_shard_size="30KB", **options)
    assert all(file.stat().st_size < 60_000 for file in (tmp_path / "many").glob("*.safetensors"))
    one, many = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "many")
    assert one.keys() == many.keys() and all(torch.equal(tensor, many[name]) for name, tensor in one.items())
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == many.keys()
    load_model(tmp_path / "many")
    assert moepress.verify(tmp_path / "many").whole
