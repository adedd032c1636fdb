"""What a model lets one do with its layers, found out on two rows of text before the work begins."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moepress.errors import MoepressError
from moepress.models.layer import MoELayer, Routing
from moepress.models.visit import CalibrationBatch
from moepress.models.walk import walk


@dataclass(frozen=True)
class Probe:
    """Each a sentence that says why not, or None."""

    stream: str | None
    """Whether the residual stream behind each layer can be seen, and follows the block's output linearly."""
    linear: str | None
    """Whether each block's output is linear in its experts' down projections."""
    router: str | None = None
    """Whether each router is one linear map of what its experts see."""


def probe(model: torch.nn.Module, batches: list[CalibrationBatch], layers: list[MoELayer]) -> Probe:
    first = batches[0]
    # Two, since there are models that treat a row otherwise when it is alone (an expert's capacity).
    rows = CalibrationBatch(
        {name: value[:2] for name, value in first.inputs.items()},
        {stack: keep[:2] for stack, keep in first.keep.items()},
        first.domain,
    )

    def reason(reference: bool) -> str | None:
        try:
            for visit in walk(model, [rows], layers=layers, reference=reference):
                if not reference:
                    visit.strength  # noqa: B018 - measured when asked for
        except MoepressError as error:
            return str(error)
        return None

    return Probe(stream=reason(True), linear=reason(False), router=_router_reason(model, rows, layers))


def _router_reason(model: torch.nn.Module, rows: CalibrationBatch, layers: list[MoELayer]) -> str | None:
    for visit in walk(model, [rows], layers=layers):
        for batch in visit.batches():
            if not _linear(batch.kept(), visit.layer.router.weight_ED):
                return (
                    f"layer {visit.layer.name!r}: its router is not one linear map of what the experts see, "
                    "so that its rows cannot be fitted: use refit.router=none"
                )
    return None


def _linear(routing: Routing, weight_ED: Tensor) -> bool:
    if routing.hidden_TD.shape[1] != weight_ED.shape[1]:
        return False
    rest_TE = routing.logits_TE.float() - routing.hidden_TD.float() @ weight_ED.float().T  # a bias or nothing
    return float((rest_TE - rest_TE.mean(0)).abs().max()) <= 0.01 * float(routing.logits_TE.float().abs().max())
