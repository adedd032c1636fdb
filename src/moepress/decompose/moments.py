"""Second moments of what goes into each matrix of the experts, on calibration text.

Shape suffixes: E physical experts, D width, F hidden units, n calls of one expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moepress.models.visit import LayerVisit


def input_moments(visit: LayerVisit) -> dict[str, Tensor]:
    """Sums of x xᵀ by matrix, (E, D, D) for up and gate and (E, F, F) for down. Each call counts as much as the router
    lets its output through. They are of one layer and large: use them before the next is visited."""
    layer, bank = visit.layer, visit.layer.bank
    table = layer.adapter.expert_map(layer.block)
    experts, hidden, width = bank.up_EFD.shape
    of = range(experts) if table is None else table.tolist()
    into_EDD = bank.up_EFD.new_zeros(experts, width, width, dtype=torch.float32)
    down_EFF = bank.up_EFD.new_zeros(experts, hidden, hidden, dtype=torch.float32)
    for batch in visit.batches():
        routing = batch.kept()
        for original, physical in enumerate(of):
            _, x_nD, weight_n = routing.calls(original)
            if len(x_nD) == 0:
                continue
            size_n1 = weight_n.float().abs()[:, None]
            h_nF = bank.hidden(physical, x_nD.to(bank.up_EFD.dtype)).float() * size_n1
            x_nD = x_nD.float() * size_n1
            into_EDD[physical] += x_nD.T @ x_nD
            down_EFF[physical] += h_nF.T @ h_nF
    return {"up": into_EDD, "gate": into_EDD, "down": down_EFF}
