"""How large the paper's models are before and after, and what a forward pass over them takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from moepress.checkpoint.sizes import predicted_sizes, sizes_of
from moepress.errors import MoepressError
from moepress.models.layer import CompactSpec, MoELayer
from moepress.paper.flops import attention_flops, forward_flops
from moepress.paper.models import MODELS, Batch, layers_of, on_meta, specs_of
from moepress.registry import did_you_mean

NOTE = (
    "stored: what a checkpoint of moepress holds. S whole: what the paper's code holds, zeros of S included. "
    "FLOPs: 329 tokens in, 13 out; every token served; every expert keeps the same share of S. "
    "The decoders read prompt and answer as one text of GPT-2's tokens, whose number the paper does not say: TFLOPs "
    "are of 329 again, and beside them stands the length from which the paper's figure would follow. About 307 tokens "
    "explain the dense model's 5.08 and MC-SMoE's 4.45; for the full model and M-SMoE the paper prints the dense "
    "model's figure, though each token runs two experts in every sparse layer."
)


@dataclass(frozen=True)
class SizeRow:
    model: str
    method: str
    parameters: int
    """What a checkpoint of moepress holds: nothing of it is zero, so it is also what the paper counts."""
    bytes: int
    """Weights, indices and maps, in the type that was asked for."""
    whole_parameters: int
    """What the paper's code holds: S is stored whole, with its zeros."""
    tflops: float
    paper_parameters: str
    paper_tflops: float
    paper_tokens: float | None = None
    """Of a decoder: the length of a text from which the paper's TFLOPs would follow."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def paper_sizes(models: Sequence[str] | None = None, *, dtype: str = "bfloat16") -> list[SizeRow]:
    """A row for each of the paper's models and methods; the weights are counted, never made."""
    for name in models or ():
        if name not in MODELS:
            raise MoepressError(f"the paper has no model {name!r}: {did_you_mean(name, list(MODELS))}")
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise MoepressError(f"{dtype!r} is not a type for weights: bfloat16, float16 or float32")
    return [row for name in models or MODELS for row in _rows(name, kind)]


def _rows(name: str, dtype: torch.dtype) -> list[SizeRow]:
    paper = MODELS[name]
    model = on_meta(paper, dtype)
    layers = layers_of(model)
    rows = []
    for method, (parameters, tflops) in paper.printed.items():
        specs = specs_of(layers, paper, method)
        sizes = predicted_sizes(model, specs) if specs else sizes_of(model)
        whole = sizes.parameters + sum(_zeros(layer, specs.get(layer.name)) for layer in layers)
        flops = forward_flops(model, paper.batch, specs, layers=layers)
        row = SizeRow(name, method, sizes.parameters, sizes.bytes, whole, flops / 1e12, parameters, tflops)
        rows.append(
            row if paper.batch.target else replace(row, paper_tokens=_tokens(model, paper.batch, flops, tflops))
        )
    return rows


def _tokens(model: Any, batch: Batch, flops: float, tflops: float) -> float:
    """The length at which there would be so many: attention grows with its square, all else with the length."""
    attention = attention_flops(model, batch)
    square, each = attention / batch.source**2, (flops - attention) / batch.source
    return (math.sqrt(each**2 + 4 * square * tflops * 1e12) - each) / (2 * square)


def _zeros(layer: MoELayer, spec: CompactSpec | None) -> int:
    """The elements of S that pruning took away from a layer."""
    if spec is None or spec.factors is None:
        return 0
    _, hidden, width = layer.bank.up_EFD.shape
    factors = spec.factors
    first, second = (width, hidden) if factors.along == "rows" else (hidden, width)
    kept = (factors.up + (factors.gate or 0)) * first + factors.down * second
    return spec.physical * hidden * width * (2 if factors.gate is None else 3) - kept
