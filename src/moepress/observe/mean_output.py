"""What each expert says on average, whoever it would be said to."""

import torch

from moepress.models.layer import ExpertBank, LayerBatch
from moepress.observe.statistic import STATISTICS, LayerShape, Statistic


@STATISTICS.register("mean-output")
class MeanOutput(Statistic):
    """`sum` (E, D): the outputs of every expert on every sampled token, also of those that its router sends
    elsewhere; `tokens` (1) counts them. All experts run on all of these tokens, which is why they are a sample."""

    runs_experts = True
    sampled = 16384

    @classmethod
    def sizes(cls, shape: LayerShape) -> dict[str, tuple[int, ...]]:
        return {"sum": (shape.experts, shape.width), "tokens": (1,)}

    def update(self, batch: LayerBatch, bank: ExpertBank) -> None:
        x_TD = batch.kept().hidden_TD.to(bank.up_EFD.dtype)
        sum_ED = torch.stack([bank.output(e, x_TD).double().sum(0) for e in range(self.shape.experts)])
        self.add("sum", sum_ED)
        self.add("tokens", torch.tensor([len(x_TD)]))
