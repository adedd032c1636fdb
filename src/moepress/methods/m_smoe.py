"""Methods that merge experts, and the one that the others come from."""

from moepress.methods.base import METHODS, Method


class Merging(Method):
    uses = frozenset(
        {
            "plan.saliency",
            "plan.similarity",
            "plan.budget",
            "plan.grouping",
            "plan.guard",
            "plan.skip",
            "align.method",
            "align.reference",
            "align.solver",
            "align.memory",
            "merge.operator",
            "refit.router",
            "router",
            "sequential",
        }
    )
    defaults = {
        "plan.saliency": "frequency",
        "plan.similarity": "router-logits",
        "plan.budget": "adaptive",
        "plan.grouping": "dominant",
        "align.method": "weight-matching",
        "align.reference": "dominant",
        "align.solver": "auto",
        "merge.operator": "frequency",
        "router": "redirect",
    }


RANDOM_GROUPS = {"plan.saliency": "random", "plan.similarity": "random", "plan.budget": "uniform"}
"""As the paper's baselines were run: any expert leads, any joins, and every layer keeps the same number."""


@METHODS.register("m-smoe")
class MSMoE(Merging):
    """Merge every expert into the dominant expert that the router treats most alike, aligned and weighted by usage;
    layers that use more experts keep more."""

    paper = "MC-SMoE, https://arxiv.org/abs/2310.01334"
    presets = {
        # Algorithm 1 of the paper aligns every expert to expert 1 before anything is grouped.
        "paper": {"align.reference": "first"},
        "paper-baselines": RANDOM_GROUPS,
    }
