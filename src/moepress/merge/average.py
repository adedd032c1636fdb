"""Weighted averages of aligned experts, summed in float32 (float64 for float64 weights)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.merge.base import MERGES, Expert, Members, Merge, shares

BLOCK = 1 << 18
"""Numbers that are added up at a time: a processor keeps them in its cache until the last tensor has been added."""


def average(tensors: list[Tensor], weights: list[float]) -> Tensor:
    """At least in float32, whatever the tensors are stored in."""
    total = torch.empty_like(tensors[0], dtype=torch.promote_types(tensors[0].dtype, torch.float32))
    average_into(total, tensors, weights)
    return total


def average_into(target: Tensor, tensors: list[Tensor], weights: list[float]) -> None:
    """The same, rounded to the target's type."""
    wide = torch.promote_types(target.dtype, torch.float32)
    rows = max(1, BLOCK // max(1, target[:1].numel())) if target.device.type == "cpu" else max(1, len(target))
    for start in range(0, len(target), rows):
        part = target[start : start + rows]
        total = part if part.dtype == wide else torch.empty_like(part, dtype=wide)
        for i, (tensor, weight) in enumerate(zip(tensors, weights, strict=True)):
            source = tensor[start : start + rows].to(wide)
            if i == 0:
                torch.mul(source, weight, out=total)
            else:
                total.add_(source, alpha=weight)
        if total is not part:
            part.copy_(total)


def average_expert(experts: list[Expert], weights: list[float]) -> Expert:
    merged = {name: torch.empty_like(tensor) for name, tensor in experts[0].items()}
    for name, target in merged.items():
        average_into(target, [expert[name] for expert in experts], weights)
    return merged


class Average(Merge):
    def merge(self, group: Members) -> Expert:
        return average_expert(group.experts, group.weights)


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
        return shares(usage, "uniform")
