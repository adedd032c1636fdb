"""Methods that decompose the experts, merged before or not."""

from moepress.methods.base import METHODS, Method
from moepress.methods.m_smoe import Merging, MSMoE

DECOMPOSE = {
    "decompose.rank": 32,
    "decompose.ratio": 0.1,
    "decompose.whiten": True,
    "decompose.refit": True,
    "decompose.along": "columns",
    "decompose.reduce": "sum",
    "decompose.smoothing": 0.85,
}
PAPER = {"decompose.whiten": False, "decompose.refit": False}
PAPER_CODE = PAPER | {"decompose.along": "rows", "decompose.reduce": "mean"}


@METHODS.register("mc-smoe")
class MCSMoE(Merging):
    """Merge as m-smoe does, then make of every merged matrix a low rank and the few columns of the rest that matter
    most."""

    paper = "MC-SMoE, https://arxiv.org/abs/2310.01334"
    uses = Merging.uses | frozenset(DECOMPOSE)
    defaults = Merging.defaults | DECOMPOSE
    presets = {
        "paper": MSMoE.presets["paper"] | PAPER,
        "paper_code": MSMoE.presets["paper"] | PAPER_CODE,
    }


@METHODS.register("c-smoe")
class CSMoE(Method):
    """Keep all experts and make of every matrix a low rank and the few columns of the rest that matter most."""

    paper = "MC-SMoE, https://arxiv.org/abs/2310.01334"
    fewer = False
    uses = frozenset({"plan.skip", *DECOMPOSE})
    defaults = DECOMPOSE
    presets = {"paper": PAPER, "paper_code": PAPER_CODE}
