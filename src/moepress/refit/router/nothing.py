from dataclasses import dataclass

from moepress.refit.router.base import ROUTER_REFITS, RouterRefit


@ROUTER_REFITS.register("none")
@dataclass(frozen=True)
class NoRouterRefit(RouterRefit):
    """Leave the router's rows as the plan says: all of them, the leaders', or the groups' means."""

    visits = False
