"""Methods that drop experts and merge nothing. They differ in the score."""

from moepress.methods.base import METHODS, Method


class Pruning(Method):
    uses = frozenset(
        {"plan.saliency", "plan.budget", "plan.grouping", "plan.guard", "plan.skip", "router", "sequential"}
        | {"refit.router"}
    )
    defaults = {"plan.budget": "uniform", "plan.grouping": "prune", "router": "keep", "sequential": True}


@METHODS.register("reap")
class ReapPruning(Pruning):
    """Drop the experts whose gated output is smallest on the tokens that choose them, layer after layer."""

    paper = "REAP, https://arxiv.org/abs/2510.13999"
    defaults = Pruning.defaults | {"plan.saliency": "reap"}
    presets = {"one-shot": {"sequential": False}}


@METHODS.register("reap-all")
class ReapAllPruning(Pruning):
    """Drop the experts that add least to the layer over all tokens, layer after layer."""

    paper = "REAP, https://arxiv.org/abs/2510.13999"
    defaults = Pruning.defaults | {"plan.saliency": "reap-all"}


@METHODS.register("frequency-pruning")
class FrequencyPruning(Pruning):
    """Drop the experts that are chosen least."""

    paper = "MC-SMoE, https://arxiv.org/abs/2310.01334"
    defaults = Pruning.defaults | {"plan.saliency": "frequency", "sequential": False}
