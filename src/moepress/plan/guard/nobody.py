from dataclasses import dataclass

from moepress.plan.facts import LayerFacts
from moepress.plan.guard.base import GUARDS, Guard


@GUARDS.register("none")
@dataclass(frozen=True)
class Nobody(Guard):
    """Every expert can be dropped or merged."""

    def alone(self, facts: LayerFacts) -> frozenset[int]:
        return frozenset()
