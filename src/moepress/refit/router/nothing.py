from dataclasses import dataclass

from torch import Tensor

from moepress.models.visit import LayerVisit
from moepress.plan import LayerPlan
from moepress.refit.router.base import ROUTER_REFITS, RouterRefit


@ROUTER_REFITS.register("none")
@dataclass(frozen=True)
class NoRouterRefit(RouterRefit):
    """Leave the router's rows as the plan says: all of them, the leaders', or the groups' means."""

    visits = False

    def remember(self, visit: LayerVisit) -> dict[int, Tensor]:
        return {}

    def fit(self, visit: LayerVisit, plan: LayerPlan, whole: dict[int, Tensor]) -> None:
        return None
