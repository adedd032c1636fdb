"""Shape suffixes: N sampled tokens, F hidden units."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moepress.align.base import ALIGNMENTS, Alignment, Expert
from moepress.models.inputs import ExpertInputs


@ALIGNMENTS.register("activation-matching")
@dataclass(frozen=True)
class ActivationMatching(Alignment):
    """The permutation of hidden units with the highest total correlation between the units of two experts, over a
    sample of the tokens that their group serves."""

    paper = "REPAIR, https://arxiv.org/abs/2211.08403"

    tokens: int = 2048
    """Of each group; their hidden units are held for two experts at a time, or for as many as are solved together."""
    needs_visit = True

    def units(self, expert: Expert, inputs: ExpertInputs | None) -> list[Tensor]:
        assert inputs is not None  # needs_visit
        return [standardised(inputs.first(self.tokens).hidden(expert)).T.contiguous()]


def standardised(hidden_NF: Tensor) -> Tensor:
    """Columns with mean 0 and norm 1, so that their inner products are correlations; constant ones are 0."""
    centred_NF = hidden_NF - hidden_NF.mean(0)
    norm_F = centred_NF.norm(dim=0)
    dead_F = norm_F <= 1e-6 * hidden_NF.norm(dim=0)
    return (centred_NF / norm_F.clamp_min(1e-30)).masked_fill(dead_F, 0)
