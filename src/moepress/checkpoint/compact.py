"""The compact format: the smallest file of a compressed model, each layer with its own number of experts.

It is the native checkpoint of the family with fewer experts, an expert_map where routers keep their rows, and the
shapes in config.json. `import moepress` is all that `from_pretrained` needs to load it.
"""

from __future__ import annotations

import os

from transformers import PreTrainedModel

from moepress.errors import MoepressError
from moepress.models.find import adapter_of, scan
from moepress.models.layer import CompactSpec


def compact_specs(model: PreTrainedModel) -> dict[str, CompactSpec]:
    """The compact layers of a loaded or attached model by path; empty for a plain model."""
    from moepress.checkpoint.quantizer import MoepressConfig

    config = getattr(model.config, "quantization_config", None)
    return config.specs() if isinstance(config, MoepressConfig) else {}


def attach(model: PreTrainedModel, specs: dict[str, CompactSpec], guard: str | None = None) -> PreTrainedModel:
    """Mark a compressed model in memory as compact: whoever saves it from now on writes a compact checkpoint."""
    from moepress.checkpoint.guard import add_guard
    from moepress.checkpoint.quantizer import FORMAT_VERSION, MoepressConfig

    if not specs:
        raise MoepressError("nothing was compressed: there are no compact layers to describe")
    for path, spec in specs.items():
        _check(model, path, spec)
    _count_rows(model, specs)
    guard = add_guard(model, list(specs), FORMAT_VERSION, guard)
    layers = {path: spec.to_dict() for path, spec in specs.items()}
    model.config.quantization_config = MoepressConfig(layers=layers, guard=guard)
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `attach`; the layers keep their compact shapes."""
    from moepress.checkpoint.guard import remove_guard

    if compact_specs(model):
        del model.config.quantization_config
        remove_guard(model)
    return model


def save_compact(
    model: PreTrainedModel,
    specs: dict[str, CompactSpec],
    folder: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a compact checkpoint into `folder`, with tokenizer and processor files copied from the folder `source`."""
    from moepress.checkpoint.companions import copy_companions
    from moepress.checkpoint.wording import keep_wording

    attach(model, specs)
    model.save_pretrained(os.fspath(folder), max_shard_size=max_shard_size)
    if source is not None:
        copy_companions(source, folder)
        keep_wording(source, folder, type(model.config))


def _count_rows(model: PreTrainedModel, specs: dict[str, CompactSpec]) -> None:
    """Load-balancing losses add up the logits of all layers, as wide as a count that the model keeps: make it the
    number of router rows, if all layers have equally many. (Layers of different widths have no such loss.)"""
    layers = [name for name, _, adapter, refusal in scan(model) if adapter is not None and refusal is None]
    shapes = {(spec.experts, spec.physical) for spec in specs.values()}
    if len(shapes) > 1 or set(layers) != set(specs) or any(spec.router != "rows" for spec in specs.values()):
        return
    ((experts, rows),) = shapes
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and getattr(module, "num_experts", None) == experts:
            module.num_experts = rows  # type: ignore[assignment]


def _check(model: PreTrainedModel, path: str, spec: CompactSpec) -> None:
    try:
        block = model.get_submodule(path)
    except AttributeError:
        raise MoepressError(f"{type(model).__name__} has no layer {path!r}") from None
    adapter = adapter_of(block)
    if adapter is None:
        raise MoepressError(f"layer {path!r} is no MoE layer that moepress knows: it is a {type(block).__name__}")
    if not 1 <= spec.physical <= spec.experts:
        raise MoepressError(f"layer {path!r} cannot keep {spec.physical} of {spec.experts} experts")
    logical = spec.physical if spec.router == "rows" else spec.experts
    if adapter.num_experts(block) != logical:
        raise MoepressError(
            f"layer {path!r} routes to {adapter.num_experts(block)} experts, but its spec says {logical}"
        )
    stored, _ = adapter.stored(block)
    if stored != spec.physical:
        raise MoepressError(f"layer {path!r} holds {stored} experts, but its spec says {spec.physical}")
    factors = adapter.factors(block)
    if (None if factors is None else factors.shape()) != spec.factors:
        raise MoepressError(f"layer {path!r} is decomposed in another way than its spec says")
