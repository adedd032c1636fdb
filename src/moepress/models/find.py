"""Find the MoE layers of a model, whatever its family."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from moepress.errors import UnsupportedModel
from moepress.models.adapter import Adapter
from moepress.models.families import ADAPTERS
from moepress.models.layer import MoELayer


def adapter_of(block: nn.Module) -> Adapter | None:
    return next((adapter for adapter in ADAPTERS if adapter.matches(block)), None)


def looks_like_experts(module: nn.Module) -> bool:
    """Whether a block that no adapter matches holds experts all the same: then it must be refused, not overlooked."""
    experts = getattr(module, "experts", None)
    return isinstance(experts, nn.Module) and any(True for _ in experts.parameters())


def scan(model: nn.Module) -> Iterator[tuple[str, nn.Module, Adapter | None, str | None]]:
    """Every block that holds experts: its path, itself, its adapter and why it would be refused (None: it is fine)."""
    for name, block in model.named_modules():
        adapter = adapter_of(block)
        if adapter is not None:
            yield name, block, adapter, adapter.refusal(block)
        elif looks_like_experts(block):
            kind = type(block.experts).__name__
            yield name, block, None, f"moepress does not know how {kind} stores its experts"


def find_layers(model: nn.Module) -> list[MoELayer]:
    """The MoE layers in module order. Raises `UnsupportedModel`, naming the layer, if any cannot be handled."""
    encoder = model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else None
    in_encoder = {id(module) for module in encoder.modules()} if encoder is not None else set()
    layers: list[MoELayer] = []
    for name, block, adapter, refusal in scan(model):
        if adapter is None or refusal is not None:
            raise UnsupportedModel(f"{type(model).__name__}: layer {name!r} is not supported: {refusal}")
        stack = "encoder" if id(block) in in_encoder else "decoder"
        layers.append(MoELayer(name, len(layers), block, adapter, stack))
    if not layers:
        raise UnsupportedModel(
            f"{type(model).__name__} has no MoE layers: it is a dense model, and there is nothing to merge"
        )
    return layers
