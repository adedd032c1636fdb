"""The mean input of each expert's tokens."""

import torch

from moepress.models.layer import ExpertBank, LayerBatch
from moepress.observe.statistic import STATISTICS, LayerShape, Statistic


@STATISTICS.register("features")
class Features(Statistic):
    """`sum`, `abs`, `square` (E, D): sums of x, |x| and x² over the tokens routed to each expert; `count` (E)."""

    @classmethod
    def sizes(cls, shape: LayerShape) -> dict[str, tuple[int, ...]]:
        per_input = (shape.experts, shape.width)
        return {"sum": per_input, "abs": per_input, "square": per_input, "count": (shape.experts,)}

    def update(self, batch: LayerBatch, bank: ExpertBank) -> None:
        routing = batch.kept()
        sums = {name: torch.zeros(size, dtype=torch.float64) for name, size in self.sizes(self.shape).items()}
        for e in range(self.shape.experts):
            x_nD = routing.calls(e)[1].double()
            sums["sum"][e], sums["abs"][e], sums["square"][e] = x_nD.sum(0), x_nD.abs().sum(0), x_nD.square().sum(0)
            sums["count"][e] = len(x_nD)
        for name, value in sums.items():
            self.add(name, value)
