from moepress.methods.base import METHODS
from moepress.methods.m_smoe import Merging


@METHODS.register("merge-moe")
class MergeMoE(Merging):
    """Merge as m-smoe does, layer after layer, and solve the down projections of the merged experts for what the
    original model computed. No training."""

    paper = "after MergeMoE, https://arxiv.org/abs/2510.14436"
    uses = Merging.uses | {"refit.method"}
    defaults = Merging.defaults | {"refit.method": "least-squares", "sequential": True}
