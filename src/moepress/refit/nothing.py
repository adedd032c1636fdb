from dataclasses import dataclass

from torch import Tensor

from moepress.models.visit import LayerVisit
from moepress.refit.base import REFITS, Refit


@REFITS.register("none")
@dataclass(frozen=True)
class Nothing(Refit):
    """Leave merged and kept experts as they are."""

    visits = False

    def fit(self, visit: LayerVisit, whole: dict[int, Tensor]) -> None:
        return None
