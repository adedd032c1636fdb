from moepress.methods.base import METHODS
from moepress.methods.m_smoe import Merging


@METHODS.register("hc-smoe")
class HCSMoE(Merging):
    """Merge experts that say the same on average, found by hierarchical clustering, weighted by usage; the same number
    in every layer."""

    paper = "HC-SMoE, https://arxiv.org/abs/2410.08589"
    defaults = Merging.defaults | {
        "plan.similarity": "mean-output",
        "plan.budget": "uniform",
        "plan.grouping": "hierarchical",
        "align.method": "none",
    }
