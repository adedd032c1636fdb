"""Weighted averages of aligned experts, summed in float32 (float64 for float64 weights)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.merge.base import MERGES, Merge


class Average(Merge):
    def merge(self, members: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
        merged = {}
        for name, first in members[0].items():
            total = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float32))
            for member, weight in zip(members, weights, strict=True):
                total.add_(member[name].to(total.dtype), alpha=weight)
            merged[name] = total.to(first.dtype)
        return merged


@MERGES.register("frequency")
@dataclass(frozen=True)
class FrequencyAverage(Average):
    """The average weighted by how often each expert is used. A group that was never used is averaged uniformly."""

    paper = "MC-SMoE, https://arxiv.org/abs/2310.01334"

    def weights(self, usage: list[float]) -> list[float]:
        return shares(usage)


@MERGES.register("saliency")
@dataclass(frozen=True)
class SaliencyAverage(Average):
    """The average weighted by how much each expert matters, by the saliency that the plan is made with."""

    paper = "REAM, https://arxiv.org/abs/2604.04356"
    weigh_by = "score"

    def weights(self, usage: list[float]) -> list[float]:
        return shares(usage)


@MERGES.register("uniform")
@dataclass(frozen=True)
class UniformAverage(Average):
    """The plain average."""

    paper = "Model soups, https://arxiv.org/abs/2203.05482"

    def weights(self, usage: list[float]) -> list[float]:
        return [1 / len(usage)] * len(usage)


def shares(amounts: list[float]) -> list[float]:
    """Each one's part of the total; equal ones of nothing."""
    total = sum(amounts)
    return [amount / total for amount in amounts] if total > 0 else [1 / len(amounts)] * len(amounts)
