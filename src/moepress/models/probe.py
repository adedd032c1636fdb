"""What a model lets one do with its layers, found out on two rows of text before the work begins."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moepress.errors import MoepressError
from moepress.models.layer import MoELayer
from moepress.models.visit import CalibrationBatch
from moepress.models.walk import walk


@dataclass(frozen=True)
class Probe:
    """Each a sentence that says why not, or None."""

    stream: str | None
    """Whether the residual stream behind each layer can be seen, and follows the block's output linearly."""
    linear: str | None
    """Whether each block's output is linear in its experts' down projections."""


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

    return Probe(stream=reason(True), linear=reason(False))
