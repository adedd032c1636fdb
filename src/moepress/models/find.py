"""Find the MoE layers of a model, whatever its family."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from moepress.errors import UnsupportedModel
from moepress.models.adapter import Adapter
from moepress.models.families import ADAPTERS
from moepress.models.layer import MoELayer
from moepress.models.weights import Weights


def adapter_of(block: nn.Module) -> Adapter | None:
    return next((adapter for adapter in ADAPTERS if adapter.matches(block)), None)


def looks_like_experts(module: nn.Module) -> bool:
    """Whether a block that no adapter matches holds experts all the same: then it must be refused, not overlooked."""
    experts = getattr(module, "experts", None)
    return isinstance(experts, nn.Module) and any(True for _ in experts.parameters())


def why_left_whole(name: str, block: nn.Module) -> str | None:
    """Why a block with experts is none of our business, or None."""
    experts = getattr(block, "experts", None)
    if hasattr(experts, "map") and hasattr(experts, "reduce"):
        return "its experts are attention heads"
    if name.rpartition(".")[2] == "vision_moe":
        return "its experts see images only, and calibration text never reaches them"
    return None


def left_whole(model: nn.Module) -> dict[str, str]:
    """Blocks with experts that are knowingly not touched: their path and why."""
    found = {name: why_left_whole(name, block) for name, block in model.named_modules()}
    return {name: why for name, why in found.items() if why is not None}


def scan(model: nn.Module) -> Iterator[tuple[str, nn.Module, Adapter | None, str | None]]:
    """Every block that holds experts: its path, itself, its adapter and why it would be refused (None: it is fine)."""
    owners: dict[int, str] = {}
    for name, block in model.named_modules():
        if why_left_whole(name, block):
            continue
        adapter = adapter_of(block)
        if adapter is not None:
            refusal = adapter.refusal(block)
            for parameter in block.parameters():
                owner = owners.setdefault(id(parameter), name)
                if owner != name and refusal is None:
                    refusal = f"it shares its weights with layer {owner!r}, and the two can only change together"
            yield name, block, adapter, refusal
        elif looks_like_experts(block):
            kind = type(block.experts).__name__
            yield name, block, None, f"moepress does not know how {kind} stores its experts"


def repair(model: nn.Module) -> list[str]:
    """Put right, in place, the MoE blocks that the installed transformers computes wrongly; says what was wrong."""
    found = (adapter.repair(block) for _, block, adapter, _ in scan(model) if adapter is not None)
    return list(dict.fromkeys(reason for reason in found if reason is not None))


def find_layers(model: Any) -> list[MoELayer]:
    """The MoE layers in module order. Raises `UnsupportedModel`, naming the layer, if any cannot be handled."""
    encoder = model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else None
    in_encoder = {id(module) for module in encoder.modules()} if encoder is not None else set()
    layers: list[MoELayer] = []
    for name, block, adapter, refusal in scan(model):
        if adapter is None or refusal is not None:
            raise UnsupportedModel(f"{type(model).__name__}: layer {name!r} is not supported: {refusal}")
        stack = "encoder" if id(block) in in_encoder else "decoder"
        layers.append(MoELayer(name, len(layers), block, adapter, Weights.of(model), stack))
    if not layers:
        raise UnsupportedModel(
            f"{type(model).__name__} has no MoE layers: it is a dense model, and there is nothing to merge"
        )
    for reason in repair(model):
        warnings.warn(reason, stacklevel=2)
    return layers
