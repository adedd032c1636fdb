"""Files that are damaged, or meant to do harm: one clear sentence, and nothing else happens."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import moepress
from moepress.checkpoint.folder import INDEX, SINGLE, check_checkpoint
from moepress.checkpoint.headers import read_header
from moepress.checkpoint.manifest import NAME, RECORDS, verify
from moepress.errors import MoepressError
from moepress.observe import Statistics
from moepress.plan import Plan
from moepress.recipe import load_recipe, make_recipe

from .squeeze import build, silent  # noqa: F401
from .test_streaming import windows

# ---- random files ----------------------------------------------------------------------------------------------------

NUMBERS = st.integers(-3, 70) | st.sampled_from([2**31, 2**63, 2**64, 10**30]) | st.floats(allow_nan=True)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def objects(*keys: str) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with keys that mean something, and others."""
    return st.dictionaries(st.sampled_from(keys) | st.text(max_size=4), VALUES, max_size=6)


ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "I64", "F9", ""]) | VALUES,
        "shape": st.lists(NUMBERS, max_size=3) | VALUES,
        "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2) | VALUES,
    },
)
HEADERS = st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRIES | VALUES, max_size=3) | VALUES


def either(read: Callable[[], object]) -> None:
    """It works, or says why not."""
    try:
        read()
    except MoepressError as error:
        assert str(error) and "\n" not in str(error).strip()


@settings(max_examples=150, deadline=None)
@given(header=HEADERS, data=st.binary(max_size=70), length=st.none() | st.integers(0, 2**64 - 1))
def test_a_header_is_read_or_refused(header: Any, data: bytes, length: int | None) -> None:
    raw = json.dumps(header).encode()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.safetensors"
        file.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
        either(lambda: read_header(file))


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.safetensors"
        file.write_bytes(content)
        either(lambda: read_header(file))
        for name in ("x.json", "x.yaml", "x.safetensors"):
            (Path(folder) / name).write_bytes(content)
        either(lambda: make_recipe(load_recipe(Path(folder) / "x.yaml")))
        either(lambda: Plan.load(Path(folder) / "x.json"))
        either(lambda: Statistics.load(Path(folder) / "x"))


@settings(max_examples=100, deadline=None)
@given(
    index=st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(max_size=3), VALUES, max_size=3)}) | VALUES,
    config=VALUES,
)
def test_an_index_is_read_or_refused(index: Any, config: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(config))
        (path / INDEX).write_text(json.dumps(index))
        either(lambda: check_checkpoint(path))


@settings(max_examples=150, deadline=None)
@given(given_recipe=objects("method", "keep", "plan", "align", "calibration", "seed", "router", "format", "refit"))
def test_a_recipe_is_read_or_refused(given_recipe: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(yaml.safe_dump(given_recipe))
        either(lambda: make_recipe(load_recipe(file)))


@settings(max_examples=100, deadline=None)
@given(
    plan=st.fixed_dictionaries(
        {
            "layers": st.lists(
                st.fixed_dictionaries(
                    {"name": st.text(max_size=3) | VALUES, "experts": NUMBERS | VALUES},
                    optional={"router": VALUES, "groups": st.lists(objects("leader", "members", "weights"))},
                ),
                max_size=2,
            )
        }
    )
    | VALUES
)
def test_a_plan_is_read_or_refused(plan: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        file.write_text(json.dumps(plan))
        either(lambda: Plan.load(file))


SHAPES = st.fixed_dictionaries({"experts": NUMBERS, "width": NUMBERS, "hidden_units": NUMBERS}) | VALUES


@settings(max_examples=100, deadline=None)
@given(
    header=st.fixed_dictionaries(
        {
            "format_version": st.just(1) | VALUES,
            "layers": st.dictionaries(
                st.text(max_size=2),
                st.fixed_dictionaries({"shape": SHAPES, "statistics": st.lists(st.just("usage") | VALUES, max_size=2)}),
                max_size=2,
            ),
        }
    )
    | VALUES
)
def test_statistics_are_read_or_refused(header: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_file({"a|usage|count": torch.zeros(4)}, Path(folder) / "s.safetensors")
        (Path(folder) / "s.json").write_text(json.dumps(header))
        either(lambda: Statistics.load(Path(folder) / "s"))


@settings(max_examples=60, deadline=None)
@given(manifest=st.fixed_dictionaries({"format_version": st.just(1), "files": objects("config.json", "..")}) | VALUES)
def test_a_manifest_is_read_or_refused(manifest: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "out" / RECORDS
        place.mkdir(parents=True)
        (place / NAME).write_text(json.dumps(manifest))
        either(lambda: verify(place.parent))


# ---- a checkpoint that was tampered with -----------------------------------------------------------------------------


def sharded(path: Path) -> None:
    build("qwen3_moe").save_pretrained(path, max_shard_size="20KB")


def a_shard(path: Path) -> Path:
    """One that holds experts."""
    places = json.loads((path / INDEX).read_text())["weight_map"]
    return path / next(file for name, file in places.items() if "experts.3.up_proj" in name)


def truncated(path: Path) -> None:
    shard = a_shard(path)
    shard.write_bytes(shard.read_bytes()[:-7])


def not_finite(path: Path) -> None:
    shard = a_shard(path)
    tensors = load_file(shard)
    name = next(name for name in tensors if "experts.3.up_proj" in name)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, shard, {"format": "pt"})


def flipped_header(path: Path) -> None:
    shard = a_shard(path)
    content = bytearray(shard.read_bytes())
    content[content.index(b"shape") + 8] ^= 2
    shard.write_bytes(content)


def absurd_shape(path: Path) -> None:
    shard = a_shard(path)
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    next(iter(e for n, e in header.items() if n != "__metadata__"))["shape"] = [2**40, 2**40]
    raw = json.dumps(header).encode()
    shard.write_bytes(len(raw).to_bytes(8, "little") + raw + content[8 + length :])


def pickled(path: Path) -> None:
    for file in [*path.glob("*.safetensors"), path / INDEX]:
        file.unlink()
    torch.save({}, path / "pytorch_model.bin")


def pickle_in_the_index(path: Path) -> None:
    shard = a_shard(path)
    torch.save({}, path / "evil.bin")
    (path / INDEX).write_text((path / INDEX).read_text().replace(shard.name, "evil.bin"))


def path_trick(path: Path) -> None:
    shard = a_shard(path)
    os.replace(shard, path.parent / shard.name)
    (path / INDEX).write_text((path / INDEX).read_text().replace(shard.name, f"../{shard.name}"))


def absolute_path(path: Path) -> None:
    shard = a_shard(path)
    os.replace(shard, path.parent / shard.name)
    (path / INDEX).write_text((path / INDEX).read_text().replace(shard.name, str(path.parent / shard.name)))


def code_in_the_config(path: Path) -> None:
    (path / "evil.py").write_text(f"open({str(path.parent / 'ran')!r}, 'w')\nclass Evil: pass\n")
    change_config(path, auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}, model_type="evil")


def code_beside_a_known_type(path: Path) -> None:
    (path / "evil.py").write_text(f"open({str(path.parent / 'ran')!r}, 'w')\nclass Evil: pass\n")
    change_config(path, auto_map={"AutoModelForCausalLM": "evil.Evil"}, architectures=["Evil"])


def endless_layers(path: Path) -> None:
    change_config(path, num_hidden_layers=10**30)


def huge_layers(path: Path) -> None:
    change_config(path, hidden_size=10**12)


def negative_choice(path: Path) -> None:
    change_config(path, num_experts_per_tok=-1)


def change_config(path: Path, **entries: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | entries))


def secret_template(path: Path) -> None:
    (path.parent / "secret").write_text("secret")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "x.jinja").symlink_to(path.parent / "secret")


def link_outside(path: Path) -> None:
    shard = a_shard(path)
    os.replace(shard, path.parent / shard.name)
    shard.symlink_to(path.parent / shard.name)


def secret_link(path: Path) -> None:
    (path.parent / "secret").write_text("secret")
    (path / "tokenizer_config.json").symlink_to(path.parent / "secret")


def missing_tensor(path: Path) -> None:
    shard = a_shard(path)
    tensors = load_file(shard)
    name = next(name for name in tensors if "experts.3.up_proj" in name)
    del tensors[name]
    save_file(tensors, shard, {"format": "pt"})
    index = json.loads((path / INDEX).read_text())
    del index["weight_map"][name]
    (path / INDEX).write_text(json.dumps(index))


def other_shape(path: Path) -> None:
    shard = a_shard(path)
    tensors = load_file(shard)
    name = next(name for name in tensors if "experts.3.up_proj" in name)
    tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, shard, {"format": "pt"})


TAMPERED: dict[Callable[[Path], None], str] = {
    truncated: "is damaged|not a whole",
    flipped_header: "is damaged",
    absurd_shape: "is damaged",
    not_finite: "not finite",
    pickled: "pickled weights only",
    pickle_in_the_index: "not a safetensors file",
    path_trick: "not a file of that folder",
    absolute_path: "not a file of that folder",
    code_in_the_config: "is not understood",
    endless_layers: "num_hidden_layers=1e\\+30 is more layers",
    huge_layers: "is damaged|cannot be loaded",
    negative_choice: "chooses -1 of 8 experts",
    secret_template: "leads out of its folder",
    link_outside: "leads out of its folder",
    secret_link: "leads out of its folder",
    missing_tensor: "do not go together|is missing|incomplete|damaged",
    other_shape: "do not go together|damaged",
}


@pytest.mark.parametrize("tamper", list(TAMPERED), ids=lambda tamper: tamper.__name__)
def test_a_tampered_checkpoint_is_refused(tamper: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "model"
    sharded(path)
    tamper(path)
    before = {file.name: os.path.realpath(file) for file in path.iterdir()}
    with pytest.raises(MoepressError, match=TAMPERED[tamper]) as raised:
        moepress.compress(path, tmp_path / "out", keep=0.5, calibration=windows(tmp_path))
    assert "\n" not in str(raised.value)
    assert {file.name: os.path.realpath(file) for file in path.iterdir()} == before
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*")) and not (tmp_path / "ran").exists()


def test_code_beside_a_model_that_transformers_knows_is_not_run(tmp_path: Path) -> None:
    sharded(tmp_path / "model")
    code_beside_a_known_type(tmp_path / "model")
    moepress.compress(tmp_path / "model", tmp_path / "out", method="reap", keep=0.5, calibration=windows(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("qwen3_moe").save_pretrained(tmp_path / "model")
    text = windows(tmp_path)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(MoepressError, match=f"{SINGLE} became shorter"):
        moepress.compress(tmp_path / "model", tmp_path / "out", keep=0.5, calibration=text)

    def broken(*_: Any) -> int:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(MoepressError, match="cannot be read: Input/output error"):
        moepress.compress(tmp_path / "model", tmp_path / "out", keep=0.5, calibration=text)
    assert not list(tmp_path.glob(".out*"))


def test_the_cache_of_the_hub_is_made_of_links(tmp_path: Path) -> None:
    home = tmp_path / "models--someone--model"
    snapshot, blobs = home / "snapshots" / "abc", home / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    build("qwen3_moe").save_pretrained(tmp_path / "model")
    for file in (tmp_path / "model").iterdir():
        os.replace(file, blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert check_checkpoint(snapshot)
