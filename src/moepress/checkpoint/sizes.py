"""How large a model is, and how large it would be, without building it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from torch import Tensor, nn

from moepress.errors import MoepressError
from moepress.models.find import find_layers, scan
from moepress.models.layer import CompactSpec, ExpertBank, Factors, MoELayer
from moepress.models.weights import Weights

MAP_BYTES = 8
"""An expert_map holds one int64 for each original expert."""


INDEX_BYTES = 4
"""Columns of S and their offsets are int32."""


@dataclass(frozen=True)
class Sizes:
    """Parameters and bytes of the weights, the experts apart from everything else. Buffers count as bytes only."""

    expert_parameters: int
    expert_bytes: int
    other_parameters: int
    other_bytes: int

    @property
    def parameters(self) -> int:
        return self.expert_parameters + self.other_parameters

    @property
    def bytes(self) -> int:
        return self.expert_bytes + self.other_bytes

    def human(self) -> str:
        return human_size(self.bytes)

    def to_dict(self) -> dict[str, int]:
        return {"parameters": self.parameters, "bytes": self.bytes, **asdict(self)}

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


def human_size(size: float) -> str:
    """1234567 -> "1.23 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def sizes_of(model: nn.Module) -> Sizes:
    """The sizes of a model as its checkpoint stores it: tied weights once, persistent buffers only. Dense models and
    layers that moepress does not understand are counted too."""
    tensors = _once(model.state_dict(keep_vars=True).values())
    parameters = sum(t.numel() for t in tensors if isinstance(t, nn.Parameter))
    weights = Weights.of(model)
    bytes_ = sum(t.nbytes for t in tensors) - weights.spared()
    experts, expert_bytes_ = 0, 0
    for name, block, adapter, refusal in scan(model):
        if adapter is not None and refusal is None:
            stored = adapter.expert_tensors(block)
        else:
            stored = _once(block.experts.parameters()) if isinstance(block.experts, nn.Module) else []
        experts += sum(t.numel() for t in stored if t.is_floating_point())
        expert_bytes_ += sum(t.nbytes for t in stored) - weights.spared(f"{name}.experts.")
    return Sizes(experts, expert_bytes_, parameters - experts, bytes_ - expert_bytes_)


def _once(tensors: Iterable[object]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors if isinstance(tensor, Tensor)}.values())


def expert_bytes(layer: MoELayer) -> int:
    """The bytes of one stored expert of this layer."""
    bank, spared = layer.bank, layer.weights.spared(f"{layer.name}.experts.")
    return (sum(tensor.nbytes for tensor in bank.tensors().values()) - spared) // bank.num_experts


def predicted_sizes(model: nn.Module, specs: Mapping[str, CompactSpec]) -> Sizes:
    """What `sizes_of` would be, were these layers of a plain model compressed to these shapes."""
    layers = {layer.name: layer for layer in find_layers(model)}
    return sum((_change(_layer(layers, name), spec) for name, spec in specs.items()), start=sizes_of(model))


def factored_parameters(bank: ExpertBank, factors: Factors, physical: int | None = None) -> int:
    """Of all experts of a layer with these matrices, decomposed: the low rank, what S keeps, and the biases."""
    experts, hidden, width = bank.up_EFD.shape
    physical = experts if physical is None else physical
    columns = factors.along == "columns"
    first = (factors.up + (factors.gate or 0)) * (hidden if columns else width)
    second = factors.down * (width if columns else hidden)
    matrices = 2 if factors.gate is None else 3
    biases = sum(t[0].numel() for name, t in bank.tensors().items() if "bias" in name)
    return physical * (matrices * factors.rank * (hidden + width) + biases) + first + second


def factored_bytes(bank: ExpertBank, factors: Factors, physical: int | None = None) -> int:
    """The same in bytes, and which columns (rows) S keeps."""
    physical = bank.num_experts if physical is None else physical
    kept = [n for n in (factors.up, factors.down, factors.gate) if n is not None]
    indices = INDEX_BYTES * (sum(kept) + len(kept) * (physical + 1))
    return factored_parameters(bank, factors, physical) * bank.up_EFD.element_size() + indices


def _layer(layers: Mapping[str, MoELayer], name: str) -> MoELayer:
    if name not in layers:
        raise MoepressError(f"the model has no MoE layer {name!r}")
    return layers[name]


def _change(layer: MoELayer, spec: CompactSpec) -> Sizes:
    experts = layer.bank.num_experts
    gone = spec.physical - experts
    parameters, bytes_ = layer.expert_parameters // experts * gone, expert_bytes(layer) * gone
    if spec.factors is not None:
        parameters = factored_parameters(layer.bank, spec.factors, spec.physical) - layer.expert_parameters
        bytes_ = factored_bytes(layer.bank, spec.factors, spec.physical) - expert_bytes(layer) * experts
    if spec.router != "rows":
        return Sizes(parameters, bytes_, 0, MAP_BYTES * spec.experts)
    tensors = layer.router.tensors
    state = layer.block.state_dict(keep_vars=True)
    rows = {name: tensor for name, tensor in tensors.items() if name in state}
    trained = [tensor for name, tensor in rows.items() if isinstance(state[name], nn.Parameter)]
    per_parameter = sum(tensor[0].numel() for tensor in trained)
    spared = sum(layer.weights.spared(f"{layer.name}.{name}") // len(tensor) for name, tensor in rows.items())
    per_byte = sum(tensor[0].nbytes for tensor in rows.values()) - spared
    return Sizes(parameters, bytes_, per_parameter * gone, per_byte * gone)


def disk_bytes(folder: str | os.PathLike[str]) -> int:
    """The bytes of the weight files of a checkpoint."""
    return sum(entry.stat().st_size for entry in Path(folder).iterdir() if entry.name.endswith(".safetensors"))
