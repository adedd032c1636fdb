from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from moepress.errors import MoepressError
from moepress.registry import Registry


class Grouping(ABC):
    name: ClassVar[str]
    paper: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    drops: ClassVar[bool] = False
    """Whether experts are dropped, which a redirect cannot express."""

    def least(self, experts: int) -> int:
        """How many groups there must be at the least."""
        return 1

    @abstractmethod
    def groups(
        self, score_E: Tensor, similarity_EE: Tensor, leaders: list[int], router_groups: int = 1
    ) -> list[list[int]]:
        """As many lists of experts as there are leaders, who are the experts with the highest scores; whoever leads a
        group in the end stands first in its list. An expert in no list is dropped. With `router_groups` the experts
        form that many blocks, each of which must be given equally many groups, as `leaders` are."""

    def groups_but(
        self, alone: frozenset[int], score_E: Tensor, similarity_EE: Tensor, leaders: list[int], router_groups: int = 1
    ) -> list[list[int]]:
        """The same with some of the leaders left alone: the others are grouped as if these did not exist."""
        if not alone:
            return self.groups(score_E, similarity_EE, leaders, router_groups)
        size = len(score_E) // router_groups
        groups = [[e] for e in sorted(alone)]
        # Blocks can differ in how many are left, so that each is grouped for itself; without blocks it is all one.
        for start in range(0, len(score_E), size):
            rest = [e for e in range(start, start + size) if e not in alone]
            led = [at for at, e in enumerate(rest) if e in leaders]
            if len(led) < (self.least(len(rest)) if rest and not self.drops else 0):
                raise MoepressError(
                    f"{len(alone)} experts are guarded, which leaves {len(led)} for all others to join: keep more"
                )
            if led:
                made = self.groups(score_E[rest], similarity_EE[rest][:, rest], led)
                groups += [[rest[at] for at in group] for group in made]
        return sorted(groups)


def strongest(score_E: Tensor, k: int, router_groups: int = 1) -> list[int]:
    """The k experts with the highest scores, in their order; ties go to the lower index. With `router_groups` the
    experts form that many blocks, and each block gives equally many, as group-limited routers need."""
    score = score_E.tolist()
    size = len(score) // router_groups
    chosen: list[int] = []
    for start in range(0, len(score), size):
        ranked = sorted(range(start, start + size), key=lambda e: (-score[e], e))
        chosen += ranked[: k // router_groups]
    return sorted(chosen)


GROUPINGS: Registry[Grouping] = Registry("grouping")
