from moepress.methods.base import METHODS
from moepress.methods.m_smoe import Merging


@METHODS.register("ream")
class REAM(Merging):
    """Prune as REAP does, but merge what is removed into the few most important experts, layer after layer; the router
    keeps the rows of those that stay."""

    paper = "REAM, https://arxiv.org/abs/2604.04356"
    defaults = Merging.defaults | {
        "plan.saliency": "reap-all",
        "plan.similarity": "gated-output+router-logits",
        "plan.budget": "uniform",
        "plan.grouping": "capped",
        "align.method": "activation-weight-matching",
        "merge.operator": "saliency",
        "router": "keep",
        "sequential": True,
    }
    presets = {
        # The paper's mean over routed tokens ranks an expert high that hardly any token chose.
        "paper": {"plan.saliency": "reap"},
    }
