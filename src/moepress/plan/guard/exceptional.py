from dataclasses import dataclass, field

from moepress.errors import MoepressError
from moepress.plan.facts import LayerFacts
from moepress.plan.guard.base import GUARDS, Guard
from moepress.plan.guard.rare_experts import RareExperts
from moepress.plan.guard.super_experts import SuperExperts


@GUARDS.register("exceptional")
@dataclass(frozen=True)
class Exceptional(Guard):
    """Keeps super experts and rare experts, as the guards of these names do, but never gives them more than a share of
    the places: what is left over goes to the others."""

    most: float = 0.25
    """Share of the experts that stay, in each router group."""
    peaks: SuperExperts = field(default_factory=SuperExperts)
    rare: RareExperts = field(default_factory=RareExperts)

    needs = ("output-norm",)

    def __post_init__(self) -> None:
        if not 0 < self.most <= 1:
            raise MoepressError(f"exceptional: most is a share, above 0 and at most 1, not {self.most}")

    def alone(self, facts: LayerFacts) -> frozenset[int]:
        assert facts.keep is not None
        groups = facts.router.groups
        places = {group: int(self.most * facts.keep / groups) for group in range(groups)}
        chosen: set[int] = set()
        for e in [*self.peaks.ranked(facts), *self.rare.ranked(facts)]:
            group = e * groups // facts.experts
            if e not in chosen and places[group]:
                chosen.add(e)
                places[group] -= 1
        return frozenset(chosen)
