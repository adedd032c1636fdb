"""What checkpoints are like: several floating-point types in one, tied weights, and where they come from."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

import moepress
from moepress.checkpoint.load import load_model
from moepress.errors import MoepressError
from moepress.inspection import inspect_model

from .quantised import assert_bytes_are_kept
from .squeeze import build, silent  # noqa: F401
from .test_resume import Interrupted, files_of, interrupt
from .test_streaming import tensors_of, windows

TYPES = {"norm": torch.float32, "gate.weight": torch.float32, "down_proj": torch.float16, "layers.2.mlp": torch.float32}
"""The first whose name is part of a tensor's; the others are bf16, as the config says."""


def type_of(name: str) -> torch.dtype:
    return next((dtype for part, dtype in TYPES.items() if part in name), torch.bfloat16)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """With numbers that bf16 cannot hold."""
    model = build("qwen3_moe")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tensors = {
        name: t.to(type_of(name)) for name, t in build("qwen3_moe").state_dict().items() if "experts" not in name
    }
    saved = load_file(tmp_path / "model" / "model.safetensors")
    for name, tensor in saved.items():
        fine = tensors.get(name, tensor.float() * (1 + 2**-9))
        saved[name] = fine.to(type_of(name))
    save_file(saved, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    assert {t.dtype for t in saved.values()} == {torch.float32, torch.float16, torch.bfloat16}
    windows(tmp_path)
    return tmp_path / "model"


def compress(source: Any, out: Path, **options: Any) -> Any:
    text = str(out.parent / "text.safetensors")
    return moepress.compress(source, out, calibration=text, **{"keep": 4, "calibration.batch_size": 2, **options})


@pytest.mark.parametrize("format", ["vanilla", "compact"])
def test_pruning_keeps_types_and_bytes(format: str, mixed: Path, tmp_path: Path) -> None:
    result = compress(mixed, tmp_path / "out", method="reap", format=format)
    before, after = tensors_of(mixed), tensors_of(tmp_path / "out")
    known = {name: t for name, t in after.items() if name.rpartition(".")[0] + ".weight" in before}
    assert len(known) > 40 and all(t.dtype == type_of(name) for name, t in known.items())
    guarded = {name: t for name, t in known.items() if t.dim() <= 2}  # one tensor of a compact file has another axis
    assert_bytes_are_kept(before, guarded, result.outcome.plan)
    assert (result.before.bytes, result.after.bytes) == tuple(
        sum(t.nbytes for name, t in tensors.items() if "moepress" not in name) for tensors in (before, after)
    )
    load_model(tmp_path / "out")


@pytest.mark.parametrize("method", ["m-smoe", "prune-refit"])
def test_what_changes_keeps_its_type(method: str, mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compress(mixed, tmp_path / "out", method=method)
    after, expected = tensors_of(tmp_path / "out"), files_of(tmp_path / "out")
    known = {name for name in tensors_of(mixed) if name in after}
    assert len(known) > 40 and all(after[name].dtype == type_of(name) for name in known)
    shutil.rmtree(tmp_path / "out")
    with monkeypatch.context() as patch:
        interrupt(patch, after=1, error=Interrupted())
        with pytest.raises(Interrupted):
            compress(mixed, tmp_path / "out", method=method)
    compress(mixed, tmp_path / "out", method=method, resume=True)
    assert files_of(tmp_path / "out") == expected


@pytest.mark.parametrize("format", ["vanilla", "compact"])
def test_tied_weights_are_stored_once(format: str, tmp_path: Path) -> None:
    model = build("lfm2_moe").to(torch.bfloat16)
    assert model.config.tie_word_embeddings
    model.save_pretrained(tmp_path / "model")
    windows(tmp_path)
    compress(tmp_path / "model", tmp_path / "out", method="reap", format=format)
    before, after = tensors_of(tmp_path / "model"), tensors_of(tmp_path / "out")
    assert "lm_head.weight" not in before and "lm_head.weight" not in after
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    loaded = load_model(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


# ---- from the cache of the Hub ---------------------------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Two revisions of a model as huggingface_hub keeps them: names are links to blobs, branches are files."""
    cache = tmp_path / "cache"
    home = cache / "models--someone--model"
    folders = {}
    for number, (branch, commit) in enumerate({"main": "a" * 40, "v2": "b" * 40}.items()):
        built = tmp_path / branch
        build("qwen3_moe", seed=number).to(torch.bfloat16).save_pretrained(built, max_shard_size="60KB")
        snapshot = home / "snapshots" / commit
        for place in (snapshot, home / "blobs", home / "refs"):
            place.mkdir(parents=True, exist_ok=True)
        (home / "refs" / branch).write_text(commit)
        for file in built.iterdir():
            blob = home / "blobs" / f"{branch}-{file.name}"
            file.rename(blob)
            (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
        folders[branch] = snapshot
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    windows(tmp_path)
    return folders


@pytest.mark.parametrize("revision", [None, "v2", "b" * 40])
def test_a_hub_name_and_a_revision(revision: str | None, cached: dict[str, Path], tmp_path: Path) -> None:
    branch = "main" if revision is None else "v2"
    result = compress("someone/model", tmp_path / "named", method="reap", format="vanilla", revision=revision)
    compress(cached[branch], tmp_path / "folder", method="reap", format="vanilla")
    named, folder = tensors_of(tmp_path / "named"), tensors_of(tmp_path / "folder")
    assert named.keys() == folder.keys() and all(torch.equal(t, folder[name]) for name, t in named.items())
    assert ("--revision" in result.command) == (revision is not None)
    assert inspect_model("someone/model", revision=revision).sizes == inspect_model(cached[branch]).sizes
    assert not any(file.is_symlink() for file in (tmp_path / "named").iterdir())


def test_an_unknown_name_or_revision_is_one_sentence(cached: dict[str, Path], tmp_path: Path) -> None:
    for name, revision in (("someone/model", "v3"), ("someone/else", None)):
        with pytest.raises(MoepressError, match="no folder here, and the Hub is not asked") as raised:
            compress(name, tmp_path / "out", method="reap", revision=revision)
        assert "\n" not in str(raised.value)
    assert not list(tmp_path.glob("*out*"))
