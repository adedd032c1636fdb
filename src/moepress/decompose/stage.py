"""Decompose the experts of a whole model, merged or not, and prune S by gradients on calibration text."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moepress.decompose.gradual import remove_slices
from moepress.decompose.layer import factor_layer
from moepress.decompose.moments import input_moments
from moepress.decompose.one_shot import one_shot
from moepress.decompose.options import Decomposition
from moepress.decompose.refit import refit_layer
from moepress.errors import MoepressError
from moepress.models.layer import CompactSpec, MoELayer
from moepress.models.visit import CalibrationBatch
from moepress.models.walk import walk
from moepress.models.weights import Weights
from moepress.progress import track


def check_weights(layers: list[MoELayer]) -> None:
    if type(layers[0].weights) is not Weights:
        raise MoepressError("decomposition takes gradients of the whole model, which must be in memory: load it whole")


def decompose(
    model: torch.nn.Module,
    layers: list[MoELayer],
    specs: dict[str, CompactSpec],
    batches: Callable[[], list[CalibrationBatch]],
    options: Decomposition,
    dtype: torch.dtype | None,
) -> dict[str, CompactSpec]:
    """Give these layers, which are shaped as `specs` say, the form UV + S; returns their new shapes. Text runs through
    the model with 16-bit weights in `dtype`."""
    check_weights(layers)
    stored = {layer.name: layer.adapter.stored(layer.block)[1] for layer in layers}
    made: dict[str, CompactSpec] = {}

    def factor(layer: MoELayer, moments: dict[str, torch.Tensor] | None) -> None:
        spec, kind = specs[layer.name], stored[layer.name]
        made[layer.name] = factor_layer(layer, spec, options.rank, options.along, moments, kind)

    def refit(layer: MoELayer, moments: dict[str, torch.Tensor] | None) -> None:
        own = {name.rpartition(":")[2]: each for name, each in kept.items() if name.rpartition(":")[0] == layer.name}
        made[layer.name] = refit_layer(layer, made[layer.name], own, moments, stored[layer.name])

    with layers[0].weights.widened(dtype):
        text = batches() if options.needs_text else []
        if options.whiten:
            for visit in track(walk(model, text, layers=layers), "decompose", len(layers)):
                factor(visit.layer, input_moments(visit))
        else:
            for layer in track(layers, "decompose"):
                factor(layer, None)
        kept = one_shot(model, text, options.ratio, options.importance) if options.ratio < 1 else {}
        if kept and options.refit and options.whiten:
            for visit in track(walk(model, text, layers=layers), "refit", len(layers)):
                refit(visit.layer, input_moments(visit))
        elif kept and options.refit:
            for layer in track(layers, "refit"):
                refit(layer, None)
    for layer in layers:
        factors = layer.adapter.factors(layer.block)
        assert factors is not None
        factors.to(stored[layer.name])
    return made if options.refit else remove_slices(model, made, kept)
