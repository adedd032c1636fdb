"""What a planning method may look at: one layer's experts in canonical form, its router, its statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moepress.models.layer import ExpertBank, RouterView
from moepress.models.visit import LayerVisit


@dataclass(frozen=True)
class LayerFacts:
    name: str
    index: int
    read_bank: Callable[[], ExpertBank]
    """Reads the layer's experts. A call, since some families have to copy them together: not kept for all layers."""
    router: RouterView
    statistics: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Sums by statistic name."""
    seed: int = 0
    visit: LayerVisit | None = None
    """The layer with its calibration inputs, where it is planned while they wait in front of it."""
    keep: int | None = None
    """How many experts will stay, once that is known."""

    @property
    def experts(self) -> int:
        return self.router.weight_ED.shape[0] - self.router.fixed_experts

    def generator(self) -> torch.Generator:
        """Random numbers of this layer alone: they do not depend on which layers were planned before."""
        return torch.Generator().manual_seed(self.seed * 100_003 + self.index)


def cosine(gram_EE: Tensor) -> Tensor:
    """Cosines from inner products; a zero vector is similar to nothing."""
    norm_E = gram_EE.diagonal().clamp_min(0).sqrt()
    scale_EE = norm_E[:, None] * norm_E[None, :]
    return torch.where(scale_EE > 0, gram_EE / scale_EE.clamp_min(1e-300), torch.zeros_like(gram_EE))
