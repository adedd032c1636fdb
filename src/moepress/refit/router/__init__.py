"""What becomes of the router once experts are merged. One method a file."""

from moepress.refit.router import mass, nothing  # noqa: F401 - registration
from moepress.refit.router.base import ROUTER_REFITS, RouterRefit

__all__ = ["ROUTER_REFITS", "RouterRefit"]
