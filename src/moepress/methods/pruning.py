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
    # The paper's pruning in one shot: all but the dominant experts go, and layers that use more keep more.
    presets = {"paper": {"plan.budget": "adaptive"}}


@METHODS.register("task-specific")
class TaskSpecificPruning(Pruning):
    """Drop experts step by step while the text goes by, by how little the router still uses them: the form without
    training, layer after layer. While a model trains, `moepress.prune.ProgressivePruning` does it."""

    paper = "Task-specific expert pruning, https://arxiv.org/abs/2206.00277"
    defaults = Pruning.defaults | {"plan.saliency": "progressive"}
