"""Router rows of merged groups, fitted to what the members' rows said together.

Before the merge a group got a token if one of its members did. With one row left it should be as likely: by the sum of
the members' probabilities, whose logarithm, log Σ exp z over the members, is the logit that the row is fitted to.

Shape suffixes: T tokens, E experts, G groups, D input width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.errors import MoepressError
from moepress.models.probe import Probe
from moepress.models.visit import LayerVisit
from moepress.plan import LayerPlan
from moepress.refit.router.base import ROUTER_REFITS, RouterRefit


@ROUTER_REFITS.register("mass")
@dataclass(frozen=True)
class Mass(RouterRefit):
    """Ridge least squares of each merged group's row on the log of its members' exponentiated logits together; tokens
    count by the group's share of all. Closed form. No gain where the merged expert serves these tokens worse than
    those that they would have gone to: on a small model with skewed routing the leader's own row was better."""

    ridge: float = 0.01
    """λ as a share of the mean diagonal of the inputs' Gram matrix."""

    rows = True

    def __post_init__(self) -> None:
        if not self.ridge > 0:
            raise MoepressError(f"mass: ridge must be positive, not {self.ridge}")

    def check(self, found: Probe) -> None:
        if found.router is not None:
            raise MoepressError(found.router)

    def remember(self, visit: LayerVisit) -> dict[int, Tensor]:
        return {i: visit.observe(i)[0].routing.logits_TE for i in visit.numbers}

    @torch.no_grad()
    def fit(self, visit: LayerVisit, plan: LayerPlan, whole: dict[int, Tensor]) -> None:
        layer = visit.layer
        merged = [g for g, group in enumerate(plan.groups) if len(group.members) > 1]
        if not merged:
            return
        weight_GD = layer.router.weight_ED
        width = weight_GD.shape[1]
        gram_GDD = torch.zeros(len(merged), width, width, dtype=torch.float64, device=weight_GD.device)
        right_GD = torch.zeros(len(merged), width, dtype=torch.float64, device=weight_GD.device)
        for i in visit.numbers:
            batch, _ = visit.observe(i)
            keep_T = batch.keep_T
            x_TD = batch.routing.hidden_TD[keep_T].float()
            before_TE, now_TG = whole[i][keep_T].float(), batch.routing.logits_TE[keep_T].float()
            all_T = before_TE[:, : plan.experts].logsumexp(-1)
            for at, g in enumerate(merged):
                mass_T = before_TE[:, list(plan.groups[g].members)].logsumexp(-1)
                share_T = (mass_T - all_T).exp()
                gram_GDD[at] += (x_TD.T @ (x_TD * share_T[:, None])).double()
                right_GD[at] += (x_TD.T @ (share_T * (mass_T - now_TG[:, g]))).double()
        diagonal_G = gram_GDD.diagonal(dim1=1, dim2=2)
        diagonal_G += (self.ridge * diagonal_G.mean(1, keepdim=True)).clamp_min(1e-12)
        change_GD = torch.linalg.solve(gram_GDD, right_GD[..., None])[..., 0]
        if not torch.isfinite(change_GD).all():
            raise MoepressError(f"layer {layer.name!r}: its router rows have no finite fit; use a larger ridge")
        weight_GD[merged] += change_GD.to(weight_GD.dtype)
