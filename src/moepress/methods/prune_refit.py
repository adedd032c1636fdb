from moepress.methods.base import METHODS
from moepress.methods.pruning import Pruning


@METHODS.register("prune-refit")
class PruneRefit(Pruning):
    """Drop the experts that add least, layer after layer, and solve the down projections of the others for what the
    original model computed. No training."""

    paper = "after REAP, https://arxiv.org/abs/2510.13999, and MergeMoE, https://arxiv.org/abs/2510.14436"
    uses = Pruning.uses | {"refit.method"}
    defaults = Pruning.defaults | {"plan.saliency": "reap-all", "refit.method": "least-squares"}
