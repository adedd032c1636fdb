"""One matrix product on a CPU, by the faster of two libraries.

Shape suffixes: n tokens, I and O widths.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")

if ONEDNN:

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _flops(x_shape: tuple[int, ...], w_shape: tuple[int, ...], *_: object, **__: object) -> int:
        return 2 * x_shape[0] * w_shape[0] * w_shape[1]


def linear(x_nI: Tensor, w_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear`. In float32 and without gradients by oneDNN, which torch has but does not use there: on the AMD
    processor where it was measured it takes half the time of MKL."""
    if _suits_onednn(x_nI, w_OI):
        return torch.ops.mkldnn._linear_pointwise(x_nI, w_OI, bias_O, "none", [], "")
    return F.linear(x_nI, w_OI, bias_O)


def _suits_onednn(x_nI: Tensor, w_OI: Tensor) -> bool:
    return (
        ONEDNN
        and x_nI.dtype == w_OI.dtype == torch.float32
        and x_nI.device.type == w_OI.device.type == "cpu"
        and type(w_OI) in (Tensor, torch.nn.Parameter)
        and x_nI.numel() > 0
        and w_OI.numel() > 0
        and not (torch.is_grad_enabled() and (x_nI.requires_grad or w_OI.requires_grad))
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()  # inductor makes this choice itself
        and bool(torch.backends.mkldnn.enabled)
    )
