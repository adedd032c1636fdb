"""The other ways to make one expert of a group that the paper compares with, on the groups of M-SMoE. With the preset
`paper-baselines` groups are random and of the same number in every layer, as they were there."""

from moepress.methods.base import METHODS
from moepress.methods.m_smoe import RANDOM_GROUPS, Merging


class Baseline(Merging):
    presets = {"paper-baselines": RANDOM_GROUPS}


@METHODS.register("averaging")
class Averaging(Baseline):
    """The plain average of each group, its experts as they are stored."""

    paper = "Model soups, https://arxiv.org/abs/2203.05482"
    defaults = Merging.defaults | {"merge.operator": "uniform", "align.method": "none"}


@METHODS.register("git-rebasin")
class GitReBasin(Baseline):
    """The plain average of each group, aligned by weights."""

    paper = "Git Re-Basin, https://arxiv.org/abs/2209.04836"
    defaults = Merging.defaults | {"merge.operator": "uniform"}


@METHODS.register("repair")
class REPAIR(Baseline):
    """The plain average of each group, aligned by activations, with the statistics of its activations restored."""

    paper = "REPAIR, https://arxiv.org/abs/2211.08403"
    defaults = Merging.defaults | {"merge.operator": "repair", "align.method": "activation-matching"}


@METHODS.register("zipit")
class ZipItMerging(Baseline):
    """Hidden units of each group merged within and across experts, by correlation."""

    paper = "ZipIt!, https://arxiv.org/abs/2305.03053"
    defaults = Merging.defaults | {"merge.operator": "zipit", "align.method": "none"}


@METHODS.register("fisher")
class FisherMerging(Baseline):
    """Each group averaged weight by weight, by how much the loss depends on each."""

    paper = "Fisher merging, https://arxiv.org/abs/2111.09832"
    defaults = Merging.defaults | {"merge.operator": "fisher"}
