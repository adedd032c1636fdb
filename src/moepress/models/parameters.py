"""The parameters that hold a layer's experts, and gradients for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moepress.errors import UnsupportedModel
from moepress.models.layer import ExpertBank, MoELayer


def expert_parameters(layer: MoELayer) -> list[nn.Parameter]:
    experts = getattr(layer.block, "experts", None)
    if isinstance(experts, nn.Module):
        return list(experts.parameters())
    # Experts that stand in the block itself: the parameters that the canonical bank is a view of.
    owned = {tensor.untyped_storage().data_ptr() for tensor in layer.adapter.expert_tensors(layer.block)}
    found = [p for p in layer.block.parameters() if p.untyped_storage().data_ptr() in owned]
    if not found:
        raise UnsupportedModel(f"the expert weights of layer {layer.name!r} cannot be trained by themselves")
    return found


def gradient_bank(layer: MoELayer, parameters: list[nn.Parameter]) -> ExpertBank:
    """The gradients of a layer's experts in canonical form, read in the same way as the weights; zeros where a
    parameter has none."""
    weights = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return layer.bank
    finally:
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight


@contextmanager
def only_training(model: nn.Module, chosen: Iterable[Tensor]) -> Iterator[None]:
    """Gradients for the chosen parameters and no others, no dropout, no router noise; afterwards as it was."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    training, wanted = model.training, {id(parameter) for parameter in chosen}
    for parameter, _ in before:
        parameter.requires_grad_(id(parameter) in wanted)
    # A student is compared with a teacher that has no dropout and no router noise either.
    model.eval()
    try:
        yield
    finally:
        for parameter, required in before:
            parameter.grad = None
            parameter.requires_grad_(required)
        model.train(training)
