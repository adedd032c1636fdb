"""How a block combines its experts: measured, since configs say it in many ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moepress.errors import MoepressError

if TYPE_CHECKING:
    from moepress.models.visit import LayerVisit


@torch.no_grad()
def experts_strength(visit: LayerVisit, number: int) -> float:
    """What the block multiplies its experts' output with (1 in most families), measured on one batch by doubling the
    experts."""
    layer = visit.layer
    batch, bank = visit.observe(number)[0], layer.bank
    routing = batch.routing
    experts_TD = torch.zeros_like(routing.hidden_TD, dtype=torch.float32)
    for e in range(bank.num_experts):
        token_n, x_nD, gate_n = routing.calls(e)
        y_nD = bank.output(e, x_nD.to(bank.up_EFD.dtype)).float()
        experts_TD.index_add_(0, token_n, y_nD * gate_n[:, None].float())
    once = visit.output(number)
    if once.shape != experts_TD.shape:
        raise MoepressError(_not_linear(layer.name))
    kept = {name: tensor.clone() for name, tensor in bank.tensors().items() if name.startswith("down")}
    layer.adapter.write_bank(layer.block, bank.map(lambda name, t: t.mul_(2) if name in kept else t))
    twice = visit.output(number)
    layer.adapter.write_bank(layer.block, bank.map(lambda name, t: kept.get(name, t)))
    change = (twice - once).float()[batch.keep_T]
    experts_TD = experts_TD[batch.keep_T]
    strength = float((change * experts_TD).sum() / experts_TD.square().sum().clamp_min(1e-30))
    if strength == 0 or float((change - strength * experts_TD).norm() / (strength * experts_TD.norm())) > 0.02:
        raise MoepressError(_not_linear(layer.name))
    return float(f"{strength:.4g}")


def _not_linear(name: str) -> str:
    return f"layer {name!r}: its output is not linear in its experts, so that least squares cannot be used"
