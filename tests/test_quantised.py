"""Quantised checkpoints: read as transformers reads them, pruned byte for byte, quantised again where they change."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import moepress
from moepress.checkpoint.files import TensorFiles
from moepress.checkpoint.load import load_model
from moepress.checkpoint.sizes import disk_bytes, sizes_of
from moepress.errors import MoepressError
from moepress.estimate import estimate
from moepress.inspection import inspect_model
from moepress.models.find import find_layers
from moepress.recipe import make_recipe
from moepress.report import records_of

from .quantised import CONFIGS, assert_bytes_are_kept, plain, quantise
from .squeeze import silent  # noqa: F401
from .test_processes import alone, together
from .test_resume import Interrupted, files_of, interrupt
from .test_streaming import tensors_of, windows, with_a_prediction_head

KINDS = tuple(CONFIGS)
REFERENCE = {
    "fp8": transformers.FineGrainedFP8Config(weight_block_size=(8, 8), dequantize=True),
    "powers": transformers.FineGrainedFP8Config(weight_block_size=(8, 8), scale_fmt="ue8m0", dequantize=True),
    "mxfp4": transformers.Mxfp4Config(dequantize=True),
}
"""What transformers unpacks without another package; not matrices that are no multiple of the block."""
KEEP = {"ragged": 6}
STEPS = {"fp8": 0.05, "tied": 0.05, "ragged": 0.05, "powers": 0.05, "mxfp4": 0.2, "int4": 0.15}
"""The relative error of rounding: fp8 keeps three bits behind the leading one, MXFP4 one, int4 sixteen even steps."""


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


OFTEN = ("fp8", "mxfp4", "int4")
"""The rest takes its time."""


@pytest.fixture(params=[k if k in OFTEN else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(kind: str, tmp_path: Path) -> Path:
    return quantise(kind, plain(kind, tmp_path / "plain"), tmp_path / "model")


def compress(source: Path, out: Path, kind: str, method: str = "reap", **options: Any) -> Any:
    text = source.parent / "text.safetensors"
    given = {"keep": KEEP.get(kind, 4), "calibration.batch_size": 2, "format": "vanilla", "method": method, **options}
    return moepress.compress(source, out, calibration=str(text) if text.exists() else windows(source.parent), **given)


def unpacked_twin(model: Path, out: Path) -> Path:
    load_model(model).save_pretrained(out)
    return out


def stock(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REFERENCE, indirect=True)
def test_they_are_read_as_transformers_reads_them(kind: str, model: Path) -> None:
    theirs = stock(model, quantization_config=REFERENCE[kind]).state_dict()
    ours = load_model(model).state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("kind", ["int4"], indirect=True)
def test_integers_are_read_as_compressed_tensors_reads_them(kind: str, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    compress(model, tmp_path / "out", kind, "prune-refit")
    for folder in (model, tmp_path / "out"):
        ours, theirs = load_model(folder).state_dict(), stock(folder).state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_what_is_read_is_near_what_was_quantised(kind: str, model: Path, tmp_path: Path) -> None:
    before = load_model(tmp_path / "plain")
    with pytest.warns(UserWarning, match="unpacked in memory: what is saved from there is not quantised"):
        after = load_model(model)
    assert "quantization_config" not in after.config.to_dict()
    changed = 0
    for name, tensor in before.state_dict().items():
        error = (after.state_dict()[name] - tensor).float().norm() / tensor.float().norm()
        assert error < STEPS[kind], name
        changed += bool(error > 0)
    assert changed >= 4


# ---- pruning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["reap", "frequency-pruning"])
def test_pruning_is_that_of_the_unpacked_twin_and_copies_bytes(
    kind: str, method: str, model: Path, tmp_path: Path
) -> None:
    result = compress(model, tmp_path / "out", kind, method)
    twin = compress(unpacked_twin(model, tmp_path / "twin"), tmp_path / "smaller", kind, method)
    assert result.outcome.plan == twin.outcome.plan
    assert any("none had to be quantised again" in note for note in result.outcome.notes)
    ours, theirs = load_model(tmp_path / "out").state_dict(), load_model(tmp_path / "smaller").state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert_bytes_are_kept(tensors_of(model), tensors_of(tmp_path / "out"), result.outcome.plan)


# ---- what changes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["prune-refit", "m-smoe"])
def test_what_changes_is_quantised_again(kind: str, method: str, model: Path, tmp_path: Path) -> None:
    options = {"router": "keep", "plan.budget": "uniform"} if method == "m-smoe" else {}
    result = compress(model, tmp_path / "out", kind, method, **options)
    assert any("matrices were quantised again" in note for note in result.outcome.notes)
    before, after = tensors_of(model), tensors_of(tmp_path / "out")
    kinds = {(name.rpartition(".")[2], tensor.dtype) for name, tensor in before.items()}
    assert {(name.rpartition(".")[2], tensor.dtype) for name, tensor in after.items()} == kinds
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == CONFIGS[kind]
    assert moepress.verify(tmp_path / "out").whole
    twin = unpacked_twin(model, tmp_path / "twin")
    compress(twin, tmp_path / "smaller", kind, method, **options, plan=result.outcome.plan)
    smaller, theirs = load_model(tmp_path / "out"), load_model(tmp_path / "smaller").state_dict()
    first, *_, last = find_layers(smaller)
    for name, tensor in smaller.state_dict().items():
        error = (tensor - theirs[name]).float().norm() / theirs[name].float().norm()
        if not name.startswith(last.name):  # which was made for what is stored of the first
            assert error < STEPS[kind], name
        if name == f"{first.name}.experts.down_proj":
            assert error > 0


def test_auto_goes_with_quantised_weights(tmp_path: Path) -> None:
    model = quantise("fp8", plain("fp8", tmp_path / "plain"), tmp_path / "model")
    compress(model, tmp_path / "out", "fp8", "auto")
    assert find_layers(stock(tmp_path / "out"))[0].num_experts == 4


@pytest.mark.parametrize("kind", REFERENCE, indirect=True)
def test_the_output_generates_in_stock_transformers(kind: str, model: Path, tmp_path: Path) -> None:
    compress(model, tmp_path / "out", kind, "prune-refit")
    theirs = stock(tmp_path / "out", quantization_config=REFERENCE[kind])
    prompt = torch.arange(5, 15)[None]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ours = load_model(tmp_path / "out")
    assert torch.equal(theirs.generate(prompt, **options), ours.generate(prompt, **options))
    assert not set(theirs.state_dict()) ^ set(ours.state_dict())


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"], indirect=True)
def test_an_interrupted_run_ends_with_the_same_files(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress(model, tmp_path / "out", kind, "prune-refit")
    report = records_of(tmp_path / "out") / "report.json"
    expected, notes = files_of(tmp_path / "out"), json.loads(report.read_text())["notes"]
    shutil.rmtree(tmp_path / "out")
    with monkeypatch.context() as patch:
        interrupt(patch, after=1, error=Interrupted())
        with pytest.raises(Interrupted):
            compress(model, tmp_path / "out", kind, "prune-refit")
    compress(model, tmp_path / "out", kind, "prune-refit", resume=True)
    assert files_of(tmp_path / "out") == expected
    assert json.loads(report.read_text())["notes"] == notes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "mxfp4"], indirect=True)
def test_two_processes_write_the_same_files(kind: str, model: Path, tmp_path: Path) -> None:
    arguments = ["compress", str(model), "--keep", "4", "--calibration", windows(tmp_path), "--batch-size", "2"]
    arguments += ["--method", "prune-refit", "--format", "vanilla"]
    assert files_of(alone(tmp_path, arguments)) == files_of(together(tmp_path, 2, arguments))


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"], indirect=True)
def test_large_layers_are_files_of_their_own(kind: str, model: Path, tmp_path: Path) -> None:
    compress(model, tmp_path / "one", kind, "prune-refit")
    compress(model, tmp_path / "many", kind, "prune-refit", max_shard_size="8KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(torch.equal(t.view(torch.uint8), many[name].view(torch.uint8)) for name, t in one.items())
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == many.keys()


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    model = quantise("fp8", plain("fp8", tmp_path / "plain"), tmp_path / "model")
    shutil.copytree(model, tmp_path / "sharded")
    (tmp_path / "sharded" / "model.safetensors").unlink()
    places = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(sorted(tensors_of(model)))}
    for part in set(places.values()):  # weights and their scales in different files
        own = {name: tensor for name, tensor in tensors_of(model).items() if places[name] == part}
        save_file(own, tmp_path / "sharded" / part, {"format": "pt"})
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    for source, out in (("model", "one"), ("sharded", "many")):
        compress(tmp_path / source, tmp_path / out, "fp8")
    one, many = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(torch.equal(tensor.view(torch.uint8), many[name].view(torch.uint8)) for name, tensor in one.items())


def test_a_quantised_prediction_head_is_left_out_whole(tmp_path: Path) -> None:
    head = with_a_prediction_head(tmp_path / "plain")
    quantise("ragged", tmp_path / "plain", tmp_path / "model")
    assert any("layers.7" in name and name.endswith("_scale_inv") for name in tensors_of(tmp_path / "model"))
    result = compress(tmp_path / "model", tmp_path / "out", "ragged")
    assert any("multi-token prediction" in note for note in result.outcome.notes)
    assert head and not any("layers.7" in name for name in tensors_of(tmp_path / "out"))
    load_model(tmp_path / "out")


# ---- sizes -----------------------------------------------------------------------------------------------------------


def stored_bytes(folder: Path) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(folder).values())


def test_sizes_are_those_of_the_files(kind: str, model: Path, tmp_path: Path) -> None:
    options = {"keep": KEEP.get(kind, 4), "format": "vanilla", "method": "reap"}
    predicted = estimate(model, make_recipe({}, options))
    result = compress(model, tmp_path / "out", kind)
    assert predicted.bytes_before == result.before.bytes == stored_bytes(model) < disk_bytes(model)
    assert predicted.bytes_after == result.after.bytes == stored_bytes(tmp_path / "out")
    assert predicted.parameters_before == sizes_of(load_model(model)).parameters
    assert predicted.parameters_after == result.after.parameters == sizes_of(load_model(tmp_path / "out")).parameters
    per_expert = (predicted.bytes_before - predicted.bytes_after) / (8 - options["keep"])
    target = predicted.bytes_before - int(2.5 * per_expert)  # three must go, or as many as divide by the groups
    asked = make_recipe({}, {"format": "vanilla", "method": "reap", "target_size": str(target)})
    if kind != "ragged":
        assert estimate(model, asked).experts == 5


def test_inspect_shows_the_storage(kind: str, model: Path) -> None:
    seen = inspect_model(model)
    assert seen.sizes.bytes == stored_bytes(model) and not seen.unpacked and not seen.unread
    assert {"fp8": "fp8 in blocks of 8 x 8", "mxfp4": "MXFP4", "int4": "int4 in groups of 8"}.get(
        kind, "fp8"
    ) in seen.note()
    assert seen.to_dict()["storage"] == seen.storage and seen.to_dict()["supported"]
    (model / "model.safetensors").unlink()  # as from the Hub, where only the config is fetched
    unpacked = inspect_model(model)
    assert unpacked.unpacked and unpacked.sizes.bytes > seen.sizes.bytes
    assert unpacked.sizes.parameters == seen.sizes.parameters


# ---- refused ---------------------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, "with gptq, and of quantised checkpoints moepress reads"),
    "awq": ({"quant_method": "awq", "bits": 4}, "is quantised with awq"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "is quantised with bitsandbytes"),
    "nvfp4": ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, r"\(nvfp4-pack-quantized\)"),
    "per tensor": ({"quant_method": "fp8", "weight_block_size": None}, "not in blocks"),
    "static": (CONFIGS["fp8"] | {"activation_scheme": "static"}, "activation_scheme"),
    "e5m2": (CONFIGS["fp8"] | {"fmt": "e5m2"}, "of the kind 'e5m2'"),
    "asymmetric": (
        CONFIGS["int4"] | {"config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "symmetric": False}}}},
        "not symmetric ones",
    ),
    "activations": (
        CONFIGS["int4"] | {"config_groups": {"g": {"weights": {}, "input_activations": {"num_bits": 8}}}},
        "activations are quantised, too",
    ),
    "no groups": (CONFIGS["int4"] | {"config_groups": {}}, "no config_groups"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_refused_before_anything_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described, message = OTHERS[name]
    source = plain("fp8", tmp_path / "model")
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": described}
    (source / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(TensorFiles, "_fill", lambda *_: pytest.fail("weights were read"))
    for work in (lambda: load_model(source), lambda: compress(source, tmp_path / "out", "fp8")):
        with pytest.raises(MoepressError, match=message) as raised:
            work()
        assert "give the checkpoint in its original precision" in str(raised.value)
    assert not list(tmp_path.glob("*out*"))
    seen = inspect_model(source)
    assert seen.unread and not seen.to_dict()["supported"] and "refused" in seen.note()


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "compact": ({"format": "compact"}, "use format=vanilla"),
    "gradients": ({"method": "fisher", "router": "keep", "plan.budget": "uniform"}, "use another method"),
    "decomposed": ({"method": "c-smoe", "keep": None, "format": "compact"}, "use another method"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_go_with_quantised_weights(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantise("fp8", plain("fp8", tmp_path / "plain"), tmp_path / "model")
    monkeypatch.setattr(TensorFiles, "_fill", lambda *_: pytest.fail("weights were read"))
    options, message = UNFIT[case]
    with pytest.raises(MoepressError, match=message):
        compress(model, tmp_path / "out", "fp8", **options)
    assert not list(tmp_path.glob("*out*"))


UP = "model.layers.1.mlp.experts.0.up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"
INTEGERS = torch.ones(32, 32, dtype=torch.int8)
DAMAGE: dict[str, tuple[str, dict[str, Tensor | None], str]] = {
    "no scales": ("fp8", {f"{UP}.weight_scale_inv": None}, "incomplete"),
    "another grid": ("fp8", {f"{UP}.weight_scale_inv": torch.ones(1, 1)}, "does not go with"),
    "another type": ("fp8", {"model.layers.1.self_attn.q_proj.weight": INTEGERS}, "stored as I8"),
    "unknown": ("fp8", {f"{UP}.input_scale": torch.ones(1)}, "does not know what"),
    "one is not": ("fp8", {f"{UP}.weight_scale_inv": None, f"{UP}.weight": torch.ones(24, 32)}, "others are not"),
    "no exponents": ("mxfp4", {f"{DOWN}_scales": None}, "incomplete"),
    "other exponents": ("mxfp4", {f"{DOWN}_scales": torch.ones(3, dtype=torch.uint8)}, "does not go with"),
    "other groups": ("int4", {f"{UP}.weight_scale": torch.ones(24, 3)}, "does not go with"),
    "zero points": ("int4", {f"{UP}.weight_zero_point": torch.ones(3)}, "symmetric integers"),
}
"""A tensor in the place of another, or none."""


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_one_sentence_before_anything_is_read(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, changes, message = DAMAGE[case]
    model = quantise(kind, plain(kind, tmp_path / "plain"), tmp_path / "model")
    tensors = {**load_file(model / "model.safetensors"), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, model / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(TensorFiles, "_fill", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(MoepressError, match=message):
        compress(model, tmp_path / "out", kind)
    assert not list(tmp_path.glob("*out*"))
