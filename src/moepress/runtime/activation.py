"""What happens between an expert's first and second matrix, as its family does it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def activate(experts: Any, gate_nF: Tensor | None, up_nF: Tensor) -> Tensor:
    """As a fused experts module does it; `is_concatenated` says how its `_apply_gate` wants the two halves."""
    if gate_nF is None:
        return experts.act_fn(up_nF)
    if not hasattr(experts, "_apply_gate"):
        return experts.act_fn(gate_nF) * up_nF
    if getattr(experts, "is_concatenated", True):
        return experts._apply_gate(torch.cat([gate_nF, up_nF], dim=-1))
    return experts._apply_gate(torch.stack([gate_nF, up_nF], dim=-1).flatten(-2))
