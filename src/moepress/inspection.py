"""Look at a model without reading its weights."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepress.checkpoint.compact import compact_specs
from moepress.checkpoint.load import (
    load_config,
    load_model,
    load_skeleton,
    local_folder,
    quantization_method,
    quantization_of,
)
from moepress.checkpoint.quantised import storage_of
from moepress.checkpoint.quantizer import METHOD
from moepress.checkpoint.sizes import Sizes, sizes_of
from moepress.errors import MoepressError
from moepress.models.find import scan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class InspectedLayer:
    name: str
    experts: int
    physical: int
    top_k: int
    groups: int
    hidden_units: int
    parameters: int
    router: str
    refused: str | None = None
    rank: int | None = None
    """Of the low rank, where the experts are decomposed."""


@dataclass(frozen=True)
class Inspection:
    architecture: str
    sizes: Sizes
    layers: list[InspectedLayer]
    compact: bool
    storage: str = ""
    """How the weights are quantised."""
    unread: str | None = None
    """Why moepress cannot read them."""
    unpacked: bool = False
    """Whether the sizes are those of unpacked weights, as the files are not here."""

    @property
    def refused(self) -> list[InspectedLayer]:
        return [layer for layer in self.layers if layer.refused]

    def note(self) -> str:
        share = self.sizes.expert_parameters / max(self.sizes.parameters, 1)
        text = f"{self.sizes.parameters:,} parameters, {self.sizes.human()}, {share:.0%} of them in experts"
        if not self.layers:
            return text + "; no MoE layers: a dense model, nothing to merge"
        if self.compact:
            text += "; compact"
        if self.storage:
            text += f"; quantised: {self.storage}"
        if self.unpacked:
            text += ", and the sizes are those of unpacked weights"
        if self.unread:
            return f"{text}; refused: {self.unread}"
        if any(layer.rank for layer in self.layers):
            text += "; experts decomposed"
        return text + (
            f"; refused because of {self.refused[0].name}: {self.refused[0].refused}" if self.refused else ""
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "architecture": self.architecture,
            "compact": self.compact,
            "supported": bool(self.layers) and not self.refused and not self.unread,
            "storage": self.storage or None,
            "sizes": self.sizes.to_dict(),
            "layers": [asdict(layer) for layer in self.layers],
        }


def inspect_model(
    source: str | os.PathLike[str], *, trust_remote_code: bool = False, revision: str | None = None
) -> Inspection:
    model, storage, unread, unpacked = _opened(local_folder(source, revision, weights=False), trust_remote_code)
    layers = []
    for name, block, adapter, refused in scan(model):
        if adapter is None or refused is not None:
            layers.append(InspectedLayer(name, 0, 0, 0, 0, 0, 0, "", refused))
            continue
        bank, router = adapter.read_bank(block), adapter.read_router(block)
        parameters = sum(t.numel() for t in adapter.expert_tensors(block) if t.is_floating_point())
        factors = adapter.factors(block)
        layers.append(
            InspectedLayer(
                name,
                adapter.num_experts(block),
                bank.num_experts,
                router.top_k,
                router.groups,
                bank.hidden_units,
                parameters,
                router.rule,
                rank=None if factors is None else factors.shape().rank,
            )
        )
    return Inspection(
        type(model).__name__, sizes_of(model), layers, bool(compact_specs(model)), storage, unread, unpacked
    )


def _opened(folder: Path, trust_remote_code: bool) -> tuple[PreTrainedModel, str, str | None, bool]:
    """The model without its weights, how they are quantised, why they cannot be read, and whether their sizes are only
    known unpacked."""
    config = load_config(folder, trust_remote_code)
    method = quantization_method(config)
    storage = "" if method in (None, METHOD) else str(method)
    unread = None
    if storage:
        try:
            storage = storage_of(quantization_of(config), folder).description
            if any(folder.glob("*.safetensors")):
                return load_model(folder, trust_remote_code=trust_remote_code, paged=True), storage, None, False
        except MoepressError as error:
            unread = str(error)
    return load_skeleton(folder, trust_remote_code=trust_remote_code), storage, unread, bool(storage)


__all__ = ["InspectedLayer", "Inspection", "inspect_model"]
