"""Which weights are trained, and how to keep the last good ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from moepress.errors import MoepressError, UnsupportedModel
from moepress.models.find import find_layers
from moepress.models.layer import MoELayer


def trained_parameters(model: nn.Module, train: str) -> list[nn.Parameter]:
    """The parameters that `train` ("all", "experts", "router") stands for."""
    if train == "all":
        chosen = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    elif train == "experts":
        chosen = [parameter for layer in find_layers(model) for parameter in expert_parameters(layer)]
    else:
        chosen = [parameter for layer in find_layers(model) for parameter in router_parameters(layer)]
    if not chosen:
        raise MoepressError(f"train={train!r} names no weights of {type(model).__name__}")
    return list({id(parameter): parameter for parameter in chosen}.values())


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


def router_parameters(layer: MoELayer) -> list[nn.Parameter]:
    own = dict(layer.block.named_parameters())
    return [own[path] for path in layer.router.tensors if path in own]


@contextmanager
def only_training(model: nn.Module, chosen: list[nn.Parameter]) -> Iterator[None]:
    """Gradients for the chosen parameters and no others; afterwards as it was."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    training, wanted = model.training, {id(parameter) for parameter in chosen}
    for parameter, _ in before:
        parameter.requires_grad_(id(parameter) in wanted)
    # No dropout and no router jitter: the student is compared with a teacher that has none.
    model.eval()
    try:
        yield
    finally:
        for parameter, required in before:
            parameter.grad = None
            parameter.requires_grad_(required)
        model.train(training)


class LastGood:
    """A copy of the newest weights that are known to give a finite loss."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.copies = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def save(self) -> None:
        for copy, parameter in zip(self.copies, self.parameters, strict=True):
            copy.copy_(parameter)

    @torch.no_grad()
    def restore(self) -> None:
        for copy, parameter in zip(self.copies, self.parameters, strict=True):
            parameter.copy_(copy)
