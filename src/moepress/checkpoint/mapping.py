"""Which tensors of the files make which of the model's: learnt from transformers' own conversion."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from moepress.checkpoint.files import TensorFiles
from moepress.errors import MoepressError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightTransform


@dataclass(eq=False)
class Part:
    """Tensors of the model that are made together from the same tensors of the files."""

    transform: WeightTransform
    first: str
    """Name by which the transform knows its target."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Names in the files by the pattern that they match."""
    targets: list[str] = field(default_factory=list)

    def convert(self, model: nn.Module, read: Any) -> dict[str, Tensor]:
        """The model's tensors from those of the files, `read(name)` each."""
        transform = copy.deepcopy(self.transform)
        for pattern, names in self.sources.items():
            for name in names:
                transform.add_tensor(self.first, name, pattern, read(name))
        made = transform.convert(  # type: ignore[attr-defined]
            self.first, model=model, config=model.config
        )
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def places(self, out: Tensor, shape_of: Callable[[str], list[int]]) -> list[tuple[str, Tensor]] | None:
        """Where in the only target each tensor of the files belongs, if the transform does nothing but put them side by
        side: experts one after the other, and gate and up of each."""
        kinds = [(type(op).__name__, getattr(op, "dim", None)) for op in getattr(self.transform, "operations", ())]
        if not kinds:
            ((name,),) = self.sources.values()
            return [(name, out)]
        if kinds == [("MergeModulelist", 0)] and len(self.sources) == 1:
            return list(zip(self.names(), out, strict=True))
        if kinds == [("MergeModulelist", 0), ("Concatenate", 1)] and out.dim() > 1:
            ordered = [self.sources[pattern] for pattern in self.transform.source_patterns if pattern in self.sources]
            places, start = [], 0
            for names in ordered:
                rows = shape_of(names[0])[0]
                places += [(name, out[e, start : start + rows]) for e, name in enumerate(names)]
                start += rows
            return places
        return None

    def names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]


def learn(model: PreTrainedModel, files: TensorFiles, load_config: Any, partly: bool = False) -> tuple[Any, list[Part]]:
    """Have transformers load empty tensors, and keep what it makes of which. The model's own are of the types and
    shapes that they will have; what does not fit is in the report."""
    from transformers.core_model_loading import WeightTransform, convert_and_load_state_dict_in_model

    parts: dict[int, Part] = {}
    add = WeightTransform.add_tensor

    def recorded(self: WeightTransform, target: str, source: str, pattern: str, value: Any) -> None:
        if id(self) not in parts:
            parts[id(self)] = Part(copy.deepcopy(self), target)
        parts[id(self)].sources.setdefault(pattern, []).append(source)
        add(self, target, source, pattern, value)

    empty = replace(load_config, device_map={"": "meta"})
    WeightTransform.add_tensor = recorded  # type: ignore[method-assign, assignment]
    try:
        info, _ = convert_and_load_state_dict_in_model(model, {name: files.empty(name) for name in files.header}, empty)
    finally:
        WeightTransform.add_tensor = add  # type: ignore[method-assign]
    for name, shape, expected in sorted(info.mismatched_keys):
        raise MoepressError(f"the checkpoint is damaged: {name} has shape {tuple(shape)} and not {tuple(expected)}")
    for name in sorted(info.conversion_errors):
        raise MoepressError(f"the checkpoint is damaged: the tensors that make up {name} do not go together")
    for part in parts.values():
        part.targets = list(part.convert(model, files.empty))
    optional = tuple(model._keys_to_ignore_on_load_missing or ())
    lost = sorted(info.missing_keys - model.all_tied_weights_keys.keys())
    if lost and not optional and not partly:
        raise MoepressError(f"the checkpoint is incomplete: {lost[0]} is missing ({len(lost)} tensors in all)")
    return info, list(parts.values())
