"""The number of experts in a model's config, wherever the family keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moepress.errors import MoepressError

NOT_CONFIGS = ("quantization_config", "auto_map", "id2label", "label2id")
NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def expert_counts(config: Any) -> dict[str, int]:
    """Dotted name inside the config -> number of experts. A list counts if all of its entries are equal."""
    return {f"{prefix}{name}": _single(value) for prefix, holder, name, value in count_fields(config)}


def set_expert_count(config: Any, old: int, new: int) -> list[str]:
    """Set every expert count that is `old` to `new`, in place; returns the dotted names that were changed."""
    changed = []
    for prefix, holder, name, value in list(count_fields(config)):
        if _single(value) != old:
            continue
        replacement = [new] * len(value) if isinstance(value, list | tuple) else new
        if isinstance(holder, dict):
            holder[name] = replacement
        else:
            setattr(holder, name, replacement)
        changed.append(f"{prefix}{name}")
    if not changed:
        raise MoepressError(f"{type(config).__name__} says nowhere that there are {old} experts")
    return changed


def _single(value: Any) -> int:
    return value[0] if isinstance(value, list | tuple) else value


def count_fields(holder: Any, prefix: str = "") -> Iterator[tuple[str, Any, str, Any]]:
    """(prefix, the object or dict that holds the count, its name there, its value), nested configs included."""
    values = holder if isinstance(holder, dict) else vars(holder)
    for name, value in list(values.items()):
        if name in NAMES and _is_count(value):
            yield prefix, holder, name, value
        elif (isinstance(value, dict) or hasattr(value, "to_dict")) and name not in NOT_CONFIGS and name[0] != "_":
            yield from count_fields(value, f"{prefix}{name}.")


def _is_count(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(v, int) and v == value[0] for v in value)
    return isinstance(value, int) and not isinstance(value, bool)
