"""What the tests of the model families share: which work, how a batch is walked, how a router is overruled."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from moepress.models.find import find_layers
from moepress.models.layer import ExpertBank, MoELayer, RouterView
from moepress.models.walk import CalibrationBatch

from . import zoo

REFUSED = {"diffusion_gemma": "shares its weights"}
"""Families that moepress refuses, and words of the reason."""

WORKING = [name for name in zoo.FAMILIES if name not in REFUSED and name not in zoo.BROKEN]


def build(name: str, seed: int = 0) -> tuple[Any, list[MoELayer]]:
    model: Any = zoo.build(name, seed)
    if name == "zaya":  # so that some tokens skip the experts
        for layer in model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.balancing_biases[-1] += 0.7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NLLB is repaired, with a warning
        return model, find_layers(model)


def calibration(model: Any, name: str, seed: int = 0, **shape: int) -> CalibrationBatch:
    inputs = zoo.batch(model, name, seed, **shape)
    keep = {"encoder": inputs["attention_mask"].bool(), "decoder": inputs["attention_mask"].bool()}
    if "decoder_input_ids" in inputs:
        keep["decoder"] = torch.ones_like(inputs["decoder_input_ids"], dtype=torch.bool)
    return CalibrationBatch(inputs, keep)


@torch.no_grad()
def logits_of(model: Any, name: str, seed: int = 0) -> Tensor:
    return model(**zoo.batch(model, name, seed)).logits


def noisy(bank: ExpertBank, seed: int) -> ExpertBank:
    """The same experts, changed so much that no two are alike and a mix-up shows."""
    generator = torch.Generator().manual_seed(seed)
    return bank.map(lambda _, t: t + 0.3 * torch.randn(t.shape, generator=generator))


def kept_rows(view: RouterView, experts: list[int]) -> dict[str, Tensor]:
    """The router rows of some experts, followed by the fixed ones."""
    rows = view.weight_ED.shape[0]
    index = torch.tensor([*experts, *range(rows - view.fixed_experts, rows)])
    return {name: tensor[index].clone() for name, tensor in view.tensors.items()}
