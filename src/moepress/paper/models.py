"""The paper's models and what it did to them, on the meta device: their sizes are theirs, and no weight is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from moepress.decompose.importance import Importance
from moepress.decompose.options import Decomposition
from moepress.models.find import find_layers, scan
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
WHOLE_TEXT = Batch(64, 329)
"""The same for a decoder. How many tokens GPT-2's tokenizer makes of them the paper does not say."""


@dataclass(frozen=True)
class PaperModel:
    build: Callable[[], nn.Module]
    printed: dict[str, tuple[str, float]]
    """The paper's figures: parameters that are not zero, as printed, and TFLOPs."""
    experts: int = 0
    """Kept in each merged layer, on average; 0: a dense model."""
    skipped: int = 0
    """Layers at the front that stay whole."""
    batch: Batch = SQUAD
    dense: str = ""
    """The dense model that it is compared with."""


def t5_base() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(d_model=768, d_ff=3072, d_kv=64, num_heads=12, num_layers=12))


def fairseq(sparse_step: int) -> nn.Module:
    from transformers import AutoModelForCausalLM

    from moepress.fairseq.configuration import FairseqMoeConfig

    return AutoModelForCausalLM.from_config(FairseqMoeConfig(sparse_step=sparse_step))


def switch_base(experts: int = 32) -> nn.Module:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        vocab_size=32128, d_model=768, d_ff=3072, d_kv=64, num_heads=12, num_layers=12, num_decoder_layers=12,
        num_sparse_encoder_layers=6, num_sparse_decoder_layers=6, num_experts=experts,
    )  # fmt: skip
    return SwitchTransformersForConditionalGeneration(config)


MODELS: dict[str, PaperModel] = {
    "t5-base": PaperModel(t5_base, {"full": ("220M", 4.65)}),
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
        dense="t5-base",
    ),
    "fairseq-dense-125m": PaperModel(partial(fairseq, 0), {"full": ("125M", 5.08)}, batch=WHOLE_TEXT),
    "fairseq-moe-15b": PaperModel(
        partial(fairseq, 2),
        experts=16,
        printed={"full": ("15B", 5.08), "m-smoe": ("552M", 5.08), "mc-smoe": ("166M", 4.45)},
        batch=WHOLE_TEXT,
        dense="fairseq-dense-125m",
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


def layers_of(model: Any) -> list[MoELayer]:
    """None in a dense model."""
    return find_layers(model) if any(True for _ in scan(model)) else []
