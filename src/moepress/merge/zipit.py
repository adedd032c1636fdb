"""Units instead of experts are merged: each with whichever other is most like it, of the same expert or another.

Shape suffixes: N sampled tokens, F hidden units, U units of all members (members times F), D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.align.activation_matching import standardised
from moepress.merge.average import average
from moepress.merge.base import MERGES, Expert, Members, Merge, Weighting, shares
from moepress.models.layer import UNIT_AXIS


@MERGES.register("zipit")
@dataclass(frozen=True)
class ZipIt(Merge):
    """The hidden units of all members side by side; the two that correlate best are merged, again and again, within
    and across members, until as many are left as one expert has. What a merged unit reads is the weighted average of
    its units, what it writes is their sum, scaled by the members' weights: units that do the same merge without loss.

    Correlations with a merged unit are averages. About 16 U² bytes are held for a group (600 MB for U = 6,000)."""

    paper = "ZipIt!, https://arxiv.org/abs/2305.03053"

    weighted: Weighting = "uniform"
    tokens: int = 2048
    """Of each group."""
    aligns = False
    needs_visit = True

    def weights(self, usage: list[float]) -> list[float]:
        return shares(usage, self.weighted)

    def merge(self, group: Members) -> Expert:
        assert group.inputs is not None  # needs_visit
        inputs = group.inputs.first(self.tokens)
        units = group.experts[0]["up_EFD"].shape[0]
        hidden_NU = torch.cat([inputs.hidden(expert) for expert in group.experts], dim=1)
        joined_FU = zipped(hidden_NU, units)
        weight_U = torch.tensor(group.weights, dtype=joined_FU.dtype).repeat_interleave(units).to(joined_FU.device)
        writes_FU = joined_FU * weight_U
        total_F1 = writes_FU.sum(1, keepdim=True)
        # Units of members that count nothing may have been joined to each other only.
        reads_FU = torch.where(total_F1 > 0, writes_FU, joined_FU)
        reads_FU = reads_FU / reads_FU.sum(1, keepdim=True)
        merged: Expert = {}
        for name, first in group.experts[0].items():
            if name not in UNIT_AXIS:
                merged[name] = average([expert[name] for expert in group.experts], group.weights).to(first.dtype)
                continue
            rows = torch.cat([expert[name].movedim(UNIT_AXIS[name], 0) for expert in group.experts])
            combine_FU = writes_FU if name == "down_EDF" else reads_FU
            merged[name] = (combine_FU @ rows.to(combine_FU.dtype)).movedim(0, UNIT_AXIS[name]).to(first.dtype)
        return merged


def zipped(hidden_NU: Tensor, units: int) -> Tensor:
    """(units, U): 1 where a unit is joined to a merged one. Each step joins the two with the highest mean correlation;
    units that never vary count as alike."""
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    ways_NU = standardised(hidden_NU.double())
    alike_UU = (ways_NU.T @ ways_NU).clamp(-1, 1)
    dead_U = (ways_NU == 0).all(0)
    alike_UU[dead_U[:, None] & dead_U[None, :]] = 1
    distance_UU = (1 - alike_UU).fill_diagonal_(0).cpu().numpy()
    steps = linkage(squareform(distance_UU, checks=False), method="average")
    U = len(distance_UU)
    members: dict[int, list[int]] = {unit: [unit] for unit in range(U)}
    for step, (one, other) in enumerate(steps[: U - units, :2].astype(int).tolist()):
        members[U + step] = members.pop(one) + members.pop(other)
    joined_FU = torch.zeros(units, U, dtype=hidden_NU.dtype)
    for f, together in enumerate(sorted(members.values(), key=min)):
        joined_FU[f, together] = 1
    return joined_FU.to(hidden_NU.device)
