"""The largest output of each expert, as a sum that can be added up."""

import torch

from moepress.models.layer import ExpertBank, LayerBatch
from moepress.observe.statistic import STATISTICS, LayerShape, Statistic

POWER = 32
"""Of this power's sum the root is the largest value, or up to half as much again over a million tokens."""


@STATISTICS.register("output-peak")
class OutputPeak(Statistic):
    """`power` (E): Σ‖f(x)‖^32 over the tokens routed to each expert, whose 32nd root is close to the largest norm."""

    runs_experts = True

    @classmethod
    def sizes(cls, shape: LayerShape) -> dict[str, tuple[int, ...]]:
        return {"power": (shape.experts,)}

    def update(self, batch: LayerBatch, bank: ExpertBank) -> None:
        routing = batch.kept()
        power_E = torch.zeros(self.shape.experts, dtype=torch.float64)
        for e in range(self.shape.experts):
            _, x_nD, _ = routing.calls(e)
            power_E[e] = bank.output(e, x_nD.to(bank.up_EFD.dtype)).double().norm(dim=1).pow(POWER).sum()
        self.add("power", power_E)


def peaks(sums: dict[str, torch.Tensor]) -> torch.Tensor:
    """(E,) about the largest norm of each expert's output; 0 for an expert without tokens."""
    return sums["power"] ** (1 / POWER)
