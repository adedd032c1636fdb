from dataclasses import dataclass

from moepress.align.base import ALIGNMENTS, Alignment, Expert


@ALIGNMENTS.register("none")
@dataclass(frozen=True)
class NoAlignment(Alignment):
    """Average the experts in the order of units in which they were stored: the control for every alignment."""

    def units(self, expert: Expert) -> None:
        return None
