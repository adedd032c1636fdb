"""What each expert adds to the layer, as a sum over tokens."""

import torch

from moepress.models.layer import ExpertBank, LayerBatch
from moepress.observe.statistic import STATISTICS, LayerShape, Statistic


@STATISTICS.register("gated-output")
class GatedOutput(Statistic):
    """`sum` (E, D): Σ g f(x) over the tokens that are routed to each expert, with the weight g that the model's own
    router gave it."""

    runs_experts = True

    @classmethod
    def sizes(cls, shape: LayerShape) -> dict[str, tuple[int, ...]]:
        return {"sum": (shape.experts, shape.width)}

    def update(self, batch: LayerBatch, bank: ExpertBank) -> None:
        routing = batch.kept()
        sum_ED = torch.zeros(self.sizes(self.shape)["sum"], dtype=torch.float64)
        for e in range(self.shape.experts):
            _, x_nD, weight_n = routing.calls(e)
            output_nD = bank.output(e, x_nD.to(bank.up_EFD.dtype)).double()
            sum_ED[e] = (output_nD * weight_n[:, None].double()).sum(0)
        self.add("sum", sum_ED)
