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
            x = routing.hidden_TD[((routing.index_TK == e) & (routing.weight_TK != 0)).any(dim=1)].double()
            sums["sum"][e], sums["abs"][e], sums["square"][e] = x.sum(0), x.abs().sum(0), x.square().sum(0)
            sums["count"][e] = x.shape[0]
        for name, value in sums.items():
            self.add(name, value)
