"""Activations that wait in files: the same numbers, whatever the family, and next to nothing in memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from moepress.errors import MoepressError, UnsupportedModel
from moepress.models.find import find_layers
from moepress.models.shelf import Shelf, Spill
from moepress.models.walk import walk
from moepress.models.weights import Weights
from moepress.pipeline import press
from moepress.recipe import make_recipe

from . import zoo
from .families import WORKING, calibration
from .squeeze import build, silent  # noqa: F401


@pytest.fixture
def spill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spill:
    """Everything goes to disk from here on, however small it is."""
    shelf = Spill(tmp_path / "spill", small=1)
    monkeypatch.setattr(Weights, "shelf", shelf)
    return shelf


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("name", WORKING)
def test_every_family_computes_the_same(name: str, reference: bool, tmp_path: Path) -> None:
    model = build(name)
    batches = [calibration(model, name, seed) for seed in (0, 1)]

    def seen() -> list[torch.Tensor]:
        found = []
        for visit in walk(model, batches, layers=find_layers(model), sequential=True, reference=reference):
            for i in visit.numbers:
                found += [
                    visit.observe(i)[0].routing.hidden_TD.clone(),
                    visit.output(i).clone(),
                    visit.stream_norm.get(i),
                ]
                found += [visit.drift[i].clone()] if reference else []
            bank = visit.layer.bank.map(lambda name, t: t * 0.5 if name == "down_EDF" else t)
            visit.layer.adapter.write_bank(visit.layer.block, bank)
            visit.changed()
        return found

    try:
        expected = seen()
    except UnsupportedModel as error:
        pytest.skip(str(error))
    model = build(name)
    with pytest.MonkeyPatch.context() as patch:
        shelf = Spill(tmp_path / "spill", small=1)
        patch.setattr(Weights, "shelf", shelf)
        found = seen()
    assert shelf.bytes and len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize(
    "given", [{"method": "auto"}, {"method": "merge-moe"}, {"method": "reap"}, {"method": "m-smoe"}], ids=str
)
@pytest.mark.parametrize("name", ["qwen3_moe", "switch_transformers"])
def test_every_way_of_compressing_comes_to_the_same(given: dict[str, Any], name: str, spill: Spill) -> None:
    def pressed() -> dict[str, torch.Tensor]:
        model = zoo.build(name)
        recipe = make_recipe({"keep": 4, **given})
        press(model, recipe, lambda: [calibration(model, name, seed) for seed in range(4)])
        return model.state_dict()

    found = pressed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weights, "shelf", Shelf())
        expected = pressed()
    assert spill.bytes
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())


def test_a_full_disk_is_one_sentence(spill: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    model = zoo.build("qwen3_moe")
    with pytest.raises(MoepressError, match=r"cannot be written to .*: No space left on device; free some space"):
        list(walk(model, [calibration(model, "qwen3_moe", 0)]))
    assert not list(spill.folder.iterdir())
