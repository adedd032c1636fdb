"""Weighted averages of aligned experts, summed in float32 (float64 for float64 weights)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.merge.base import MERGES, Expert, Members, Merge, shares


def average(tensors: list[Tensor], weights: list[float]) -> Tensor:
    """At least in float32, whatever the tensors are stored in."""
    total = torch.zeros_like(tensors[0], dtype=torch.promote_types(tensors[0].dtype, torch.float32))
    for tensor, weight in zip(tensors, weights, strict=True):
        total.add_(tensor.to(total.dtype), alpha=weight)
    return total


def average_expert(experts: list[Expert], weights: list[float]) -> Expert:
    named = {name: [expert[name] for expert in experts] for name in experts[0]}
    return {name: average(tensors, weights).to(tensors[0].dtype) for name, tensors in named.items()}


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
