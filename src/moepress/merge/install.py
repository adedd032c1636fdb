"""Give a layer the shape and the weights that its plan says."""

from __future__ import annotations

import torch

from moepress.merge.router import router_rows
from moepress.models.layer import CompactSpec, ExpertBank, MoELayer
from moepress.plan import LayerPlan


@torch.no_grad()
def install(layer: MoELayer, plan: LayerPlan, bank: ExpertBank, capacity: int | None = None) -> CompactSpec:
    """In place; `bank` holds one expert for each group of the plan."""
    redirect = plan.router == "redirect"
    rows = {} if redirect else router_rows(layer.router, plan)
    spec = CompactSpec(plan.experts, plan.physical, "redirect" if redirect else "rows", capacity)
    layer.adapter.reshape(layer.block, spec)
    layer.adapter.write_bank(layer.block, bank)
    if redirect:
        expert_map = layer.adapter.expert_map(layer.block)
        assert expert_map is not None
        expert_map.copy_(torch.tensor(plan.expert_map()))
    else:
        layer.adapter.write_router(layer.block, rows)
    return spec
