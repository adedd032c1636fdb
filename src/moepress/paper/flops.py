"""The floating point operations of a forward pass, counted from shapes: two for each weight that a token meets, and two
for each product of attention. Norms, softmax and activations are left out, as torch's own counter leaves them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from moepress.checkpoint.sizes import factored_parameters
from moepress.models.layer import CompactSpec, MoELayer
from moepress.paper.models import Batch, layers_of

ATTENTION = {"q": ("k", "v"), "q_proj": ("k_proj", "v_proj")}
"""How attention modules call their maps: the queries' and those of the keys and values."""


def forward_flops(
    model: Any,
    batch: Batch,
    specs: Mapping[str, CompactSpec] | None = None,
    *,
    served: float = 1.0,
    layers: list[MoELayer] | None = None,
) -> float:
    """Of one pass over a plain model whose experts were compressed to these shapes. `served` is the share of the
    router's choices that found their expert with room for them; `layers` are the model's, where they are known."""
    layers = layers_of(model) if layers is None else layers
    inside = tuple(f"{layer.name}.experts." for layer in layers)
    other = sum(
        2 * module.weight.numel() * _tokens(model, name, batch)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(inside)
    )
    calls = (
        _tokens(model, layer.name, batch) * layer.router.top_k * 2 * _met(layer, (specs or {}).get(layer.name))
        for layer in layers
    )
    return other + attention_flops(model, batch) + served * sum(calls)


def _met(layer: MoELayer, spec: CompactSpec | None) -> float:
    """The weights of an average expert that a token is multiplied with: its biases are added, not multiplied."""
    bank = layer.bank
    biases = sum(tensor.numel() for name, tensor in bank.tensors().items() if "bias" in name)
    if spec is None or spec.factors is None:
        return (sum(tensor.numel() for tensor in bank.tensors().values()) - biases) / bank.num_experts
    return factored_parameters(bank, spec.factors, spec.physical) / spec.physical - biases / bank.num_experts


def attention_flops(model: nn.Module, batch: Batch) -> float:
    """Scores and the sums that they weight, for all queries and all keys, masked or not."""
    total = 0
    for name, module in model.named_modules():
        for query, (key, _) in ATTENTION.items():
            projected = getattr(module, query, None)
            if isinstance(projected, nn.Linear):
                keys = _tokens(model, f"{name}.{key}", batch) // batch.samples
                total += 4 * projected.out_features * keys * _tokens(model, f"{name}.{query}", batch)
    return total


def _tokens(model: Any, name: str, batch: Batch) -> int:
    """How many tokens a module sees: those of the input in an encoder and as keys and values of cross-attention."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return batch.samples * batch.source
    path = name.split(".")
    keys = {leaf for pair in ATTENTION.values() for leaf in pair}
    crossed = path[-1] in keys and any("EncDecAttention" in part for part in path)
    return batch.samples * (batch.source if "encoder" in path or crossed else batch.target)
