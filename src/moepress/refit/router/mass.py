"""Router rows of merged groups, fitted to what the members' rows said together.

Before the merge a group got a token if one of its members did. With one row left it should be as likely: by the sum of
the members' probabilities, whose logarithm, log Σ exp z over the members, is the logit that the row is fitted to.

Shape suffixes: T tokens, E experts, G groups, D input width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.errors import MoepressError
from moepress.exact import rounded, rounder
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
    shared = True

    def __post_init__(self) -> None:
        if not self.ridge > 0:
            raise MoepressError(f"mass: ridge must be positive, not {self.ridge}")

    def check(self, found: Probe) -> None:
        if found.router is not None:
            raise MoepressError(found.router)

    def remember(self, visit: LayerVisit) -> dict[int, Tensor]:
        return {i: visit.observe(i)[0].routing.logits_TE for i in visit.here}

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
        facing = {i: visit.shelf.put(self._facing(visit, plan, merged, i, whole[i])) for i in visit.here}

        def of(i: int) -> tuple[float, float]:
            x_TD, share_TG, missing_TG = facing[i]
            return float(x_TD.double().square().sum()), float((share_TG * missing_TG).double().square().sum())

        # A share is at most 1, so that no sum of products is larger than Σ‖x‖², or ‖x‖ ‖share · missing‖.
        inputs, missing = (sum(column) for column in zip(*visit.each(of), strict=True))
        of_gram, of_right = rounder(inputs), rounder(math.sqrt(inputs * missing))
        for x_TD, share_TG, missing_TG in facing.values():
            for g in range(len(merged)):
                gram_GDD[g] += rounded(x_TD.T @ (x_TD * share_TG[:, g, None]), of_gram)
                right_GD[g] += rounded(x_TD.T @ (share_TG[:, g] * missing_TG[:, g]), of_right)
        visit.team.add_up(gram_GDD, right_GD)
        diagonal_G = gram_GDD.diagonal(dim1=1, dim2=2)
        diagonal_G += (self.ridge * diagonal_G.mean(1, keepdim=True)).clamp_min(1e-12)
        change_GD = torch.linalg.solve(gram_GDD, right_GD[..., None])[..., 0]
        if not torch.isfinite(change_GD).all():
            raise MoepressError(f"layer {layer.name!r}: its router rows have no finite fit; use a larger ridge")
        weight_GD[merged] += change_GD.to(weight_GD.dtype)

    @staticmethod
    def _facing(
        visit: LayerVisit, plan: LayerPlan, merged: list[int], i: int, before_TE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of a batch's real tokens: what the router sees (T, D), the share of each merged group before (T, G), and by
        how much its logit falls short (T, G)."""
        batch = visit.observe(i)[0]
        keep_T = batch.keep_T
        before_TE, now_TG = before_TE[keep_T].float(), batch.routing.logits_TE[keep_T].float()
        all_T = before_TE[:, : plan.experts].logsumexp(-1)
        mass_TG = torch.stack([before_TE[:, list(plan.groups[g].members)].logsumexp(-1) for g in merged], 1)
        share_TG = (mass_TG - all_T[:, None]).exp()
        return batch.routing.hidden_TD[keep_T].float(), share_TG, mass_TG - now_TG[:, merged]
