"""The router of a layer with one row per physical expert."""

from __future__ import annotations

import torch
from torch import Tensor

from moepress.models.layer import RouterView
from moepress.plan import LayerPlan


def router_rows(view: RouterView, plan: LayerPlan) -> dict[str, Tensor]:
    """Every per-expert router tensor with a row per group: the leader's (`keep`) or the members' average (`mean`).
    Rows that stand for no weights (identity experts) follow unchanged."""
    rows = view.weight_ED.shape[0]
    fixed = list(range(rows - view.fixed_experts, rows))
    members = [group.members if plan.router == "mean" else (group.leader,) for group in plan.groups]
    members += [(row,) for row in fixed]
    made = {}
    for name, tensor in view.tensors.items():
        axis = 0 if tensor.shape[0] == rows else 1
        columns = [tensor.index_select(axis, tensor.new_tensor(m, dtype=torch.long)) for m in members]
        mean = [
            part.mean(axis, keepdim=True) if part.is_floating_point() else part.narrow(axis, 0, 1) for part in columns
        ]
        made[name] = torch.cat(mean, dim=axis)
    return made
