from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moepress.registry import Registry


@dataclass(frozen=True)
class Solution:
    order: Tensor
    """(F,) int64: unit `order[i]` of the other expert takes the place of unit i of the reference."""
    gap: float
    """Proven bound on (best possible − reached) / |reached|; 0 where the solver is exact."""


class Solver(ABC):
    name: ClassVar[str]

    @abstractmethod
    def solve(self, cost_FF: Tensor) -> Solution:
        """The assignment with the largest total."""


def certified_gap(cost_FF: Tensor, order: Tensor, price_F: Tensor) -> float:
    """How far an assignment can be from the best one, proven by any prices (weak duality)."""
    cost, price = cost_FF.double(), price_F.double().to(cost_FF.device)
    reached = cost.gather(1, order.to(cost.device)[:, None]).sum()
    bound = price.sum() + (cost - price).amax(dim=1).sum()
    return float((bound - reached).clamp_min(0) / reached.abs().clamp_min(torch.finfo(torch.float64).tiny))


SOLVERS: Registry[Solver] = Registry("solver")
