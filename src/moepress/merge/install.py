"""Give a layer the shape and the weights that its plan says."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from moepress.merge.router import router_rows
from moepress.models.layer import CompactSpec, MoELayer
from moepress.plan import LayerPlan


@torch.no_grad()
def install(
    layer: MoELayer, plan: LayerPlan, experts: Iterable[dict[str, Tensor]], capacity: int | None = None
) -> CompactSpec:
    """In place; `experts` are one for each group of the plan, and may be made of those that the layer had before."""
    redirect = plan.router == "redirect"
    rows = {} if redirect else router_rows(layer.router, plan)
    spec = CompactSpec(plan.experts, plan.physical, "redirect" if redirect else "rows", capacity)
    layer.adapter.reshape(layer.block, spec)
    layer.adapter.write_experts(layer.block, experts)
    if redirect:
        expert_map = layer.adapter.expert_map(layer.block)
        assert expert_map is not None
        expert_map.copy_(torch.tensor(plan.expert_map()))
    else:
        layer.adapter.write_router(layer.block, rows)
    return spec
