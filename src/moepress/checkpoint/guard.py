"""The guard: without moepress, transformers must refuse a compact checkpoint instead of running random experts.

transformers only warns about a `quant_method` that it does not know, and then loads what fits. Two things stop it:

- One weight, the guard, is stored with an extra last axis of size 1. Plain transformers finds a shape that does not
  match and raises, whatever the family. (The last axis, because sharded loading cuts along the first ones.)
- A tensor whose name says what to install is stored in one MoE block, so that the report printed with the error names
  it.

Both live in places that transformers itself carries through saving: the axis is a `WeightConverter` in the model's
own list of conversions, like the ones that split fused experts; the tensor is a buffer. So every way of saving writes
them (`save_pretrained`, Trainer, accelerate, sharded or not, with or without an explicit state dict).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, PrefixChange, WeightConverter

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightTransform

NOTICE = "moepress_is_required__pip_install_moepress"
"""Name of the tensor that appears in the load report of a transformers without moepress."""


def _only(tensors: dict[str, Any]) -> Tensor:
    (value,) = tensors.values()
    return value[0] if isinstance(value, list) else value


class DropAxis(ConversionOps):
    """Loading: the guard as the model holds it. A file without the extra axis loads too."""

    def __init__(self, dims: int) -> None:
        self.dims = dims

    def convert(self, input_dict: dict[str, Any], *_: Any, full_layer_name: str = "", **__: Any) -> dict[str, Any]:
        tensor = _only(input_dict)
        return {full_layer_name: tensor.squeeze(-1) if tensor.dim() == self.dims + 1 else tensor}

    @property
    def reverse_op(self) -> ConversionOps:
        return AddAxis(self.dims)


class AddAxis(ConversionOps):
    """Saving: the guard with its extra axis."""

    def __init__(self, dims: int) -> None:
        self.dims = dims

    def convert(self, input_dict: dict[str, Any], *_: Any, full_layer_name: str = "", **__: Any) -> dict[str, Any]:
        tensor = _only(input_dict)
        return {full_layer_name: tensor.unsqueeze(-1) if tensor.dim() == self.dims else tensor}

    @property
    def reverse_op(self) -> ConversionOps:
        return DropAxis(self.dims)


def guard_conversion(name: str, dims: int) -> WeightConverter:
    """From the file's form of the guard to the model's."""
    return WeightConverter(f"^{name}", f"^{name}", operations=[DropAxis(dims)])


def _is_guard(conversion: WeightTransform) -> bool:
    return any(isinstance(op, DropAxis) for op in getattr(conversion, "operations", ()))


def native_conversions(model: PreTrainedModel) -> list[WeightTransform]:
    """What transformers would do to this model's tensors when it saves them, had it never met moepress."""
    own = getattr(model, "_weight_conversions", None)
    if own is None:
        # A model that was not loaded from files is saved in its family's original format; it has no file whose
        # prefixes would have to be restored.
        own = get_model_conversion_mapping(model, add_legacy=False)
        own = [conversion for conversion in own if not isinstance(conversion, PrefixChange)]
    return [conversion for conversion in own if not _is_guard(conversion)]


def compact_conversions(model: PreTrainedModel, paths: list[str]) -> list[WeightTransform]:
    """The native conversions without those that make one tensor of the file from tensors of several modules: they
    assume that these modules have equally many experts, stored alike."""
    inside = tuple(f"{path.rpartition('.')[0]}." for path in paths)  # decomposed experts have other names themselves
    names = [name for name in model.state_dict() if name.startswith(inside)]

    def mixes(conversion: WeightTransform) -> bool:
        if len(conversion.target_patterns) == 1:
            return False
        reverse = copy.deepcopy(conversion).reverse_transform()
        return any(reverse.rename_source_key(name)[1] is not None for name in names)

    return [conversion for conversion in native_conversions(model) if not mixes(conversion)]


def choose_guard(model: PreTrainedModel, paths: list[str], conversions: list[WeightTransform]) -> str:
    """A tensor that plain transformers expects under the same name: a router weight, if no conversion touches it."""
    from moepress.models.find import adapter_of

    tensors = dict(model.state_dict())
    candidates = []
    for path in paths:
        block = model.get_submodule(path)
        adapter = adapter_of(block)
        assert adapter is not None
        names = adapter.read_router(block).tensors
        candidates += sorted((f"{path}.{name}" for name in names), key=lambda name: not name.endswith("weight"))
    inside = tuple(f"{path}." for path in paths)
    candidates += [name for name in tensors if not name.startswith(inside)]

    tied = model.all_tied_weights_keys
    shared = {*tied.keys(), *tied.values()}
    converters = copy.deepcopy([c for c in conversions if isinstance(c, WeightConverter)])
    both_ways = [*converters, *(c.reverse_transform() for c in converters)]
    for name in candidates:
        tensor = tensors.get(name)
        if tensor is None or not tensor.is_floating_point() or tensor.dim() == 0 or name in shared:
            continue
        if all(converter.rename_source_key(name)[1] is None for converter in both_ways):
            return name
    raise AssertionError(f"every weight of {type(model).__name__} is converted when it is saved")


def add_guard(model: PreTrainedModel, paths: list[str], version: int, name: str | None = None) -> str:
    """Guard every checkpoint that will be written from this model; returns the name of the guard."""
    paths = sorted(paths)  # config.json sorts them: the second save must choose like the first
    conversions = compact_conversions(model, paths)
    name = name or choose_guard(model, paths, conversions)
    tensor = model.get_parameter_or_buffer(name)
    model._weight_conversions = [*conversions, guard_conversion(name, tensor.dim())]  # type: ignore[assignment]
    add_notice(model, paths, version)
    owner = model.get_submodule(name.rpartition(".")[0])
    if not any(getattr(hook, "hook", hook) is _drop_axis for hook in owner._load_state_dict_pre_hooks.values()):
        owner.register_load_state_dict_pre_hook(_drop_axis)
    return name


def add_notice(model: nn.Module, paths: Iterable[str], version: int) -> None:
    block = model.get_submodule(min(paths))
    if NOTICE in block._buffers:
        return
    remove_notice(model)
    block.register_buffer(NOTICE, torch.tensor(version, device=next(block.parameters()).device))


def remove_notice(model: nn.Module) -> None:
    for module in model.modules():
        module._buffers.pop(NOTICE, None)


def remove_guard(model: PreTrainedModel) -> None:
    model._weight_conversions = native_conversions(model)  # type: ignore[assignment]
    remove_notice(model)


def _drop_axis(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """`load_state_dict` of a file's tensors (Trainer resumes that way) meets the guard's extra axis."""
    for name, own in module.state_dict().items():
        stored = state_dict.get(prefix + name)
        if isinstance(stored, Tensor) and stored.shape == (*own.shape, 1):
            state_dict[prefix + name] = stored.squeeze(-1)
