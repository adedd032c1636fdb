"""How often each expert is chosen."""

import torch

from moepress.models.layer import ExpertBank, LayerBatch
from moepress.observe.statistic import STATISTICS, LayerShape, Statistic


@STATISTICS.register("usage")
class Usage(Statistic):
    """`count` (E): how many times an expert was chosen; `weight` (E): the sum of its router weights; `tokens` (1)."""

    @classmethod
    def sizes(cls, shape: LayerShape) -> dict[str, tuple[int, ...]]:
        return {"count": (shape.experts,), "weight": (shape.experts,), "tokens": (1,)}

    def update(self, batch: LayerBatch, bank: ExpertBank) -> None:
        routing = batch.kept()
        # A router may point past the experts (identity experts) or choose with weight 0 (a token over capacity).
        index, weight = routing.index_TK.flatten(), routing.weight_TK.flatten().double()
        chosen = (index < self.shape.experts) & (weight != 0)
        index, weight = index[chosen], weight[chosen]
        self.add("count", torch.bincount(index, minlength=self.shape.experts))
        self.add("weight", torch.zeros_like(self.sums["weight"], device=weight.device).index_add_(0, index, weight))
        self.add("tokens", torch.tensor([routing.index_TK.shape[0]]))
