from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.merge.average import average
from moepress.merge.base import MERGES, Expert, Members, Merge, Weighting, shares


@MERGES.register("fisher")
@dataclass(frozen=True)
class FisherAverage(Merge):
    """Every single weight averaged by its diagonal empirical Fisher information: the squared gradient of a sample's
    loss, averaged over the calibration text. Costs one forward and backward pass for each sample, and memory for two
    more copies of all experts (the information and one sample's gradients)."""

    paper = "Fisher merging, https://arxiv.org/abs/2111.09832"

    weighted: Weighting = "uniform"
    """What members count beside their Fisher information."""
    floor: float = 1e-6
    """Added to the information, as a share of its mean in the group: where no member knows anything, the weighted
    average is taken."""
    needs_fisher = True

    def weights(self, usage: list[float]) -> list[float]:
        return shares(usage, self.weighted)

    def merge(self, group: Members) -> Expert:
        assert group.fisher is not None  # needs_fisher
        return {
            name: self._tensor([e[name] for e in group.experts], [f[name] for f in group.fisher], group.weights)
            for name in group.experts[0]
        }

    def _tensor(self, tensors: list[Tensor], fisher: list[Tensor], weights: list[float]) -> Tensor:
        plain = average(tensors, weights)
        mean = torch.stack([information.mean() for information in fisher]).mean()
        if not mean > 0:
            return plain.to(tensors[0].dtype)
        known = [(information / mean).to(plain.dtype) + self.floor for information in fisher]
        information = average(known, weights)
        weighed = average([tensor.to(plain.dtype) * k for tensor, k in zip(tensors, known, strict=True)], weights)
        return torch.where(information > 0, weighed / information, plain).to(tensors[0].dtype)
