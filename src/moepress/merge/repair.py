"""Averages whose activations have the statistics that the members' have.

Shape suffixes: N sampled tokens, F hidden units, D width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.merge.average import average, average_expert
from moepress.merge.base import MERGES, Expert, Members, Merge, Weighting, shares


@MERGES.register("repair")
@dataclass(frozen=True)
class Repair(Merge):
    """The average of aligned experts, with the mean and standard deviation of what enters and what leaves the
    activation function brought back to the weighted averages of the members', on the tokens that the group serves.

    What enters is scaled in the rows of gate and up and shifted in their biases, what leaves is scaled in the columns
    of down and shifted in its bias. Scales are always exact. A shift needs the bias: in experts without biases, as in
    most gated families, means are not restored, only standard deviations."""

    paper = "REPAIR, https://arxiv.org/abs/2211.08403"

    weighted: Weighting = "uniform"
    tokens: int = 2048
    """Of each group; their hidden units are held for two experts at a time."""
    needs_visit = True

    def weights(self, usage: list[float]) -> list[float]:
        return shares(usage, self.weighted)

    def merge(self, group: Members) -> Expert:
        assert group.inputs is not None  # needs_visit
        inputs = group.inputs.first(self.tokens)
        merged = average_expert(group.experts, group.weights)
        enter = inputs.preactivations
        for part, own_NF in enter(merged).items():
            scale_F, shift_F = correction((enter(e)[part] for e in group.experts), group.weights, own_NF)
            _scale_rows(merged, part, scale_F, shift_F)
        leave = inputs.hidden
        scale_F, shift_F = correction((leave(e) for e in group.experts), group.weights, leave(merged))
        down_DF = merged["down_EDF"].to(scale_F.dtype)
        if "down_bias_ED" in merged:
            merged["down_bias_ED"] = (merged["down_bias_ED"] + down_DF @ shift_F).to(merged["down_bias_ED"].dtype)
        merged["down_EDF"] = (down_DF * scale_F).to(merged["down_EDF"].dtype)
        return merged


def correction(members: Iterable[Tensor], weights: list[float], merged_NF: Tensor) -> tuple[Tensor, Tensor]:
    """What to multiply each unit's activation with, and what to add then (F each), so that it has the members' mean
    and standard deviation. A unit that does not vary is left alone."""
    seen = [statistics(activation_NF) for activation_NF in members]
    mean_F, deviation_F = (average([s[which] for s in seen], weights) for which in (0, 1))
    own_mean_F, own_deviation_F = statistics(merged_NF)
    varies_F = own_deviation_F > 1e-6 * deviation_F
    scale_F = torch.where(varies_F, deviation_F / own_deviation_F.clamp_min(1e-30), torch.ones_like(mean_F))
    return scale_F, torch.where(varies_F, mean_F - scale_F * own_mean_F, torch.zeros_like(mean_F))


def statistics(activation_NF: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, (F) each."""
    wide_NF = activation_NF.to(torch.promote_types(activation_NF.dtype, torch.float32))
    return wide_NF.mean(0), wide_NF.std(0, correction=0)


def _scale_rows(expert: Expert, part: str, scale_F: Tensor, shift_F: Tensor) -> None:
    weight_FD, bias_F = expert[f"{part}_EFD"], expert.get(f"{part}_bias_EF")
    expert[f"{part}_EFD"] = (weight_FD * scale_F[:, None]).to(weight_FD.dtype)
    if bias_F is not None:
        expert[f"{part}_bias_EF"] = (bias_F * scale_F + shift_F).to(bias_F.dtype)
