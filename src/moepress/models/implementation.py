"""Which of the implementations that transformers has for experts suits calibration."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

SETTING = "_experts_implementation_internal"
"""Of a config, read by its experts in every call."""


@contextmanager
def quickest_experts(model: nn.Module, device: torch.device) -> Iterator[None]:
    """On a CPU experts run one after the other: the grouped product that is the default there copies and masks whole
    tensors, which takes longer than the products themselves."""
    with one_after_the_other(model, {"grouped_mm"} if device.type == "cpu" else set()):
        yield


@contextmanager
def one_after_the_other(model: nn.Module, instead_of: Collection[str] | None = None) -> Iterator[None]:
    """Inside, experts run one by one, where they would run in one of these ways (None: in any)."""
    configs = {id(m.config): m.config for m in model.modules() if getattr(getattr(m, "config", None), SETTING, None)}
    before = [(config, getattr(config, SETTING)) for config in configs.values()]
    changed = [(config, way) for config, way in before if instead_of is None or way in instead_of]
    for config, _ in changed:
        setattr(config, SETTING, "eager")
    try:
        yield
    finally:
        for config, way in changed:
            setattr(config, SETTING, way)
