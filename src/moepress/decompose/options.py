"""What can be decided about the decomposition."""

from __future__ import annotations

from dataclasses import dataclass

from moepress.decompose.importance import Importance
from moepress.decompose.layer import full_shape
from moepress.errors import MoepressError
from moepress.models.layer import CompactSpec, ExpertBank, Factors, MoELayer


@dataclass(frozen=True)
class Decomposition:
    rank: int
    ratio: float
    """Share of S that stays; 1 leaves it whole, to be pruned in training."""
    whiten: bool
    along: str
    importance: Importance
    refit: bool = True
    """Solve for UV and S again once it is known what S keeps."""

    @property
    def needs_text(self) -> bool:
        return self.whiten or self.ratio < 1

    def expected(self, bank: ExpertBank, physical: int) -> Factors:
        """The shape of a layer, if it keeps its even share. (Which layer keeps more is not known before.)"""
        whole = full_shape(bank, self.rank, self.along)
        first, second = (round(n / bank.num_experts * physical * self.ratio) for n in (whole.up, whole.down))
        return Factors(whole.rank, whole.along, first, second, None if whole.gate is None else first)

    def check(self, layer: MoELayer) -> None:
        """Refuse what would not make this layer smaller."""
        _, hidden, width = layer.bank.up_EFD.shape
        stored = self.rank * (hidden + width) + self.ratio * hidden * width
        if self.rank >= min(hidden, width) or (self.ratio < 1 and stored >= hidden * width):
            raise MoepressError(
                f"layer {layer.name!r}: a rank of {self.rank} and {self.ratio:.0%} of the rest are no smaller than its "
                f"{hidden} x {width} matrices: choose a smaller decompose.rank"
            )


def remaining_shares(layer: MoELayer) -> list[float]:
    """Of each expert's matrices, the share of parameters that a decomposed layer still has."""
    factors = layer.adapter.factors(layer.block)
    assert factors is not None
    made = []
    for e in range(factors.experts):
        matrices = factors.matrices().values()
        whole = sum(m.out_width * m.in_width for m in matrices)
        low = sum(m.rank * (m.out_width + m.in_width) for m in matrices)
        made.append((low + sum(m.kept_counts()[e] * m.packed_Px.shape[1] for m in matrices)) / whole)
    return made


def shape_so_far(layer: MoELayer, specs: dict[str, CompactSpec], capacity: int | None) -> CompactSpec:
    """Of a layer that was merged, or that has kept all of its experts."""
    experts = layer.num_experts
    return specs.get(layer.name) or CompactSpec(experts, experts, "rows", capacity)
