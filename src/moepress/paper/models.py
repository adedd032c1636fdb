"""The paper's models and what it did to them, on the meta device: their sizes are theirs, and no weight is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moepress.decompose.importance import Importance
from moepress.decompose.options import Decomposition
from moepress.models.layer import CompactSpec, MoELayer

RANK, RATIO = 32, 0.1
"""Of UV, and the share of S that stays."""


@dataclass(frozen=True)
class Batch:
    """What one forward pass is given; decoder-only models see `source` alone."""

    samples: int
    source: int
    target: int = 0


SQUAD = Batch(64, 329, 13)
"""The first 64 training samples of SQuAD, as T5's tokenizer pads them: the batch of the paper's FLOPs."""


@dataclass(frozen=True)
class PaperModel:
    build: Callable[[], nn.Module]
    experts: int
    """Kept in each merged layer, on average."""
    skipped: int
    """Layers at the front that stay whole."""
    printed: dict[str, tuple[str, float]]
    """The paper's figures: parameters that are not zero, as printed, and TFLOPs."""


def switch_base(experts: int = 32) -> nn.Module:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        vocab_size=32128, d_model=768, d_ff=3072, d_kv=64, num_heads=12, num_layers=12, num_decoder_layers=12,
        num_sparse_encoder_layers=6, num_sparse_decoder_layers=6, num_experts=experts,
    )  # fmt: skip
    return SwitchTransformersForConditionalGeneration(config)


MODELS: dict[str, PaperModel] = {
    "switch-base-32": PaperModel(
        switch_base,
        experts=8,
        skipped=1,
        printed={
            "full": ("2.0B", 4.65),
            "m-smoe": ("733M", 4.65),
            "c-smoe": ("570M", 3.83),
            "mc-smoe": ("381M", 3.83),
        },
    ),
}


def on_meta(model: PaperModel, dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        return model.build().to(dtype).eval()


def specs_of(layers: list[MoELayer], model: PaperModel, method: str) -> dict[str, CompactSpec]:
    """The shapes that a method leaves, with every layer at the average."""
    if method == "full":
        return {}
    merge, decompose = method != "c-smoe", method != "m-smoe"
    return {layer.name: _spec(layer, model, merge, decompose) for layer in layers[model.skipped :]}


def _spec(layer: MoELayer, model: PaperModel, merge: bool, decompose: bool) -> CompactSpec:
    experts = layer.num_experts
    physical = model.experts if merge else experts
    form = "redirect" if merge else "rows"
    if not decompose:
        return CompactSpec(experts, physical, form)
    options = Decomposition(RANK, RATIO, whiten=False, along="columns", importance=Importance())
    return CompactSpec(experts, physical, form, factors=options.expected(layer.bank, physical))
