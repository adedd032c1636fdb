from dataclasses import dataclass

from moepress.align.base import ALIGNMENTS, Alignment, Expert
from moepress.models.inputs import ExpertInputs


@ALIGNMENTS.register("none")
@dataclass(frozen=True)
class NoAlignment(Alignment):
    """Average the experts in the order of units in which they were stored: the control for every alignment."""

    def units(self, expert: Expert, inputs: ExpertInputs | None) -> None:
        return None
