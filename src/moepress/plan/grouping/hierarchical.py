from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from moepress.plan.grouping.base import GROUPINGS, Grouping


@GROUPINGS.register("hierarchical")
@dataclass(frozen=True)
class Hierarchical(Grouping):
    """The two clusters that are most alike become one, until as many are left as are wanted. Nobody is chosen to lead
    beforehand; a cluster is led by its most important member."""

    linkage: Literal["average", "single", "complete"] = "average"
    """How alike two clusters are: as the pairs of their members on average, at best, or at worst."""

    paper = "HC-SMoE, https://arxiv.org/abs/2410.08589"

    def groups(
        self, score_E: Tensor, similarity_EE: Tensor, leaders: list[int], router_groups: int = 1
    ) -> list[list[int]]:
        score, size = score_E.tolist(), len(score_E) // router_groups
        groups: list[list[int]] = []
        for start in range(0, len(score), size):
            block_EE = similarity_EE[start : start + size, start : start + size]
            for members in self._clusters(block_EE.double().cpu().numpy(), len(leaders) // router_groups):
                groups.append(sorted((start + e for e in members), key=lambda e: (-score[e], e)))
        return sorted(groups)

    def _clusters(self, similarity_EE: np.ndarray, count: int) -> list[list[int]]:
        from scipy.cluster.hierarchy import cut_tree, linkage
        from scipy.spatial.distance import squareform

        if len(similarity_EE) == 1:
            return [[0]]
        # Of all three linkages only the order of distances and their means matter, not where they begin.
        distance_EE = similarity_EE.max() - (similarity_EE + similarity_EE.T) / 2
        np.fill_diagonal(distance_EE, 0)
        tree = linkage(squareform(distance_EE, checks=False), self.linkage)
        label_E = cut_tree(tree, n_clusters=count)[:, 0]
        return [np.flatnonzero(label_E == label).tolist() for label in range(count)]
