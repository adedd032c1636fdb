"""Which weights are trained, and how to keep some of their states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moepress.errors import MoepressError, UnsupportedModel
from moepress.models.find import find_layers
from moepress.models.layer import MoELayer
from moepress.models.parameters import expert_parameters
from moepress.models.taps import replaced


def trained_parameters(model: nn.Module, train: str) -> list[nn.Parameter]:
    """The parameters that `train` stands for."""
    everything = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    layers = [] if train == "all" else find_layers(model)
    if train == "all":
        chosen = everything
    elif train == "all-but-router":
        routers = {id(parameter) for layer in layers for parameter in router_parameters(layer)}
        chosen = [parameter for parameter in everything if id(parameter) not in routers]
    elif train == "moe":
        chosen = [p for layer in layers for p in layer.block.parameters() if p.is_floating_point()]
    elif train == "experts":
        chosen = [parameter for layer in layers for parameter in expert_parameters(layer)]
    else:
        chosen = [parameter for layer in layers for parameter in router_parameters(layer)]
    if not chosen:
        raise MoepressError(f"train={train!r} names no weights of {type(model).__name__}")
    return list({id(parameter): parameter for parameter in chosen}.values())


def router_parameters(layer: MoELayer) -> list[nn.Parameter]:
    own = dict(layer.block.named_parameters())
    return [own[path] for path in layer.router.tensors if path in own]


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Each decoder layer keeps its inputs only, and runs once more in the backward pass. The model's own switch works
    in training mode alone, which would bring dropout."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UnsupportedModel(f"{type(model).__name__} has no layers whose activations can be computed twice")
    with ExitStack() as stack:
        for layer in layers:
            again = partial(checkpoint, layer.forward, use_reentrant=False)
            stack.enter_context(replaced(layer, "forward", again))
        yield


def local(parameter: Tensor) -> Tensor:
    """The part of a parameter that this process holds: all of it, if it is not split over processes."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[no-any-return]


class Kept:
    """A copy of the trained weights as they were at some time; of split weights, of this process's part."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.copies: list[Tensor] | None = None

    @torch.no_grad()
    def save(self) -> None:
        if self.copies is None:
            self.copies = [local(parameter.detach()).clone() for parameter in self.parameters]
        for copy, parameter in zip(self.copies, self.parameters, strict=True):
            copy.copy_(local(parameter))

    @torch.no_grad()
    def restore(self) -> None:
        assert self.copies is not None
        for copy, parameter in zip(self.copies, self.parameters, strict=True):
            local(parameter).copy_(copy)
