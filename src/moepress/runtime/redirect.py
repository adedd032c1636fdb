"""The redirect: a small integer table that sends each original expert to the physical expert that holds it.

It is a hook on a native module, not a module of our own, so that the experts keep their class and with it every fast
kernel, parallel plan and recorder that transformers has for them. The hooks are plain functions: they copy and pickle.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moepress.errors import MoepressError


def redirected(module: Any, index: Tensor) -> Tensor:
    """Original experts -> physical experts. A router's fixed rows (identity experts) follow the physical experts."""
    table = module.expert_map
    if not module.expert_map_fixed:
        return table[index]
    experts = table.numel()
    moved = index - experts + module.expert_map_physical
    return torch.where(index < experts, table[index.clamp(max=experts - 1)], moved)


def _map_integers(module: Any, values: Iterable[Any]) -> tuple:
    mapped, found = [], False
    for value in values:
        is_index = isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)
        mapped.append(redirected(module, value) if is_index else value)
        found |= is_index
    if not found:  # silence would mean experts chosen by numbers that belong to others
        raise MoepressError(f"{type(module).__name__} passes no expert indices that a redirect could map")
    return tuple(mapped)


def _after_router(module: nn.Module, args: tuple, output: tuple) -> tuple:
    return _map_integers(module, output)


def _before_experts(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    mapped = _map_integers(module, (*args, *kwargs.values()))
    return mapped[: len(args)], dict(zip(kwargs, mapped[len(args) :], strict=True))


def add_map(module: Any, experts: int, physical: int, fixed: int = 0) -> bool:
    """Give a module its table; whether it is the first (a hook must not be added twice)."""
    first = not isinstance(getattr(module, "expert_map", None), Tensor)
    device = next(module.parameters()).device
    module.register_buffer("expert_map", torch.zeros(experts, dtype=torch.int64, device=device))
    module.expert_map_fixed = fixed
    module.expert_map_physical = physical
    return first


def redirect_router(router: nn.Module, experts: int, physical: int, fixed: int = 0) -> None:
    """Map the integer outputs of a router."""
    if add_map(router, experts, physical, fixed):
        router.register_forward_hook(_after_router)


def redirect_experts(module: nn.Module, experts: int, physical: int, fixed: int = 0) -> None:
    """Map the integer inputs of an experts module; for families that choose experts outside of the router."""
    if add_map(module, experts, physical, fixed):
        module.register_forward_pre_hook(_before_experts, with_kwargs=True)


def redirect_of(*modules: nn.Module) -> Tensor | None:
    maps = (getattr(module, "expert_map", None) for module in modules)
    return next((m for m in maps if isinstance(m, Tensor)), None)
