from moepress.methods.base import METHODS
from moepress.methods.m_smoe import Merging


@METHODS.register("hc-smoe")
class HCSMoE(Merging):
    """Merge experts that add the same to the layer on average, found by hierarchical clustering, weighted by usage; the
    same number in every layer."""

    paper = "HC-SMoE, https://arxiv.org/abs/2410.08589"
    defaults = Merging.defaults | {
        "plan.similarity": {"name": "gated-output", "measure": "distance"},
        "plan.budget": "uniform",
        "plan.grouping": "hierarchical",
        "align.method": "none",
    }
    presets = {
        # The paper compares what experts say to all tokens, also to those that never get there.
        "paper": {"plan.similarity": "mean-output"},
    }
