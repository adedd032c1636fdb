from moepress.methods.base import METHODS
from moepress.methods.prune_refit import PruneRefit


@METHODS.register("auto")
class Auto(PruneRefit):
    """The strongest without training: several criteria propose which experts go, each proposal is tried with a
    least-squares refit, and the one with the smallest error on held-out text is carried out, layer after layer."""

    uses = PruneRefit.uses | {"plan.rivals"}
    defaults = PruneRefit.defaults | {
        "plan.saliency": "elimination",
        "plan.rivals": ["reap-all", "reap"],
        "plan.guard": "exceptional",
        "refit.method": {"name": "least-squares", "otherwise": "nothing"},
    }
