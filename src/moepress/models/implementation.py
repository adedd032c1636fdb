"""Which of the implementations that transformers has for experts suits calibration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

SETTING = "_experts_implementation_internal"
"""Of a config, read by its experts in every call."""


@contextmanager
def quickest_experts(model: nn.Module, device: torch.device) -> Iterator[None]:
    """On a CPU experts run one after the other: the grouped product that is the default there copies and masks whole
    tensors, which takes longer than the products themselves."""
    configs = {id(m.config): m.config for m in model.modules() if getattr(getattr(m, "config", None), SETTING, None)}
    changed = [c for c in configs.values() if device.type == "cpu" and getattr(c, SETTING) == "grouped_mm"]
    for config in changed:
        setattr(config, SETTING, "eager")
    try:
        yield
    finally:
        for config in changed:
            setattr(config, SETTING, "grouped_mm")
