"""How much each expert adds to the layer's output."""

import torch
from torch import Tensor

from moepress.models.layer import ExpertBank, LayerBatch
from moepress.observe.statistic import STATISTICS, LayerShape, Statistic

POWER = 32
"""Of this power's sum the root is the largest value, or up to half as much again over a million tokens. A largest value
itself could not be added up."""


@STATISTICS.register("output-norm")
class OutputNorm(Statistic):
    """Over the tokens routed to each expert (E each): `norm` Σ‖f(x)‖, `power` Σ‖f(x)‖^32, `gated` Σ g‖f(x)‖,
    `gated_square` Σ g²‖f(x)‖², and their number `routed`; `tokens` (1) counts all tokens, so that `gated / routed` is
    REAP's mean over routed tokens and `gated / tokens` its mean over all of them."""

    runs_experts = True

    @classmethod
    def sizes(cls, shape: LayerShape) -> dict[str, tuple[int, ...]]:
        names = ("norm", "power", "gated", "gated_square", "routed")
        sizes: dict[str, tuple[int, ...]] = {name: (shape.experts,) for name in names}
        return sizes | {"tokens": (1,)}

    def update(self, batch: LayerBatch, bank: ExpertBank) -> None:
        routing = batch.kept()
        sums = {name: torch.zeros(size, dtype=torch.float64) for name, size in self.sizes(self.shape).items()}
        for e in range(self.shape.experts):
            token_n, x_nD, weight_n = routing.calls(e)
            if len(token_n) == 0:
                continue
            norm_n = bank.output(e, x_nD.to(bank.up_EFD.dtype)).float().norm(dim=1).double()
            gated_n = norm_n * weight_n.double()
            sums["norm"][e], sums["power"][e] = norm_n.sum(), norm_n.pow(POWER).sum()
            sums["gated"][e], sums["gated_square"][e] = gated_n.sum(), gated_n.square().sum()
            sums["routed"][e] = len(token_n)
        sums["tokens"][0] = routing.index_TK.shape[0]
        for name, value in sums.items():
            self.add(name, value)


def peaks(sums: dict[str, Tensor]) -> Tensor:
    """(E,) about the largest norm of each expert's output; 0 for an expert without tokens."""
    return sums["power"] ** (1 / POWER)
