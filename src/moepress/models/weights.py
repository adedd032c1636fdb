"""Where the weights of a model are while it is worked on.

Here: all of them in memory, all the time. `checkpoint/paging.py` has the other answer: in the files, and read when a
forward pass or a stage gets to them. Whoever needs the values of a layer's weights outside of a `walk` says so with
`layer.weights.at_hand(layer)`; `walk` itself says where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from moepress.models.precision import in_dtype
from moepress.models.shelf import Shelf

if TYPE_CHECKING:
    from moepress.models.layer import MoELayer

MARK = "_moepress_weights"


class Weights:
    """All in memory: nothing has to be done."""

    resident = True
    """Whether they are all in memory at a time, as a backward pass needs them."""
    shelf: Shelf = Shelf()
    """Where activations wait."""

    quantised = ""
    """How they are stored, where the files hold them in another form than the model computes with."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @staticmethod
    def of(model: nn.Module) -> Weights:
        return model.__dict__.get(MARK) or Weights(model)

    @property
    def device(self) -> torch.device:
        """Where forward passes take place."""
        return next(self.model.parameters()).device

    def spared(self, within: str = "") -> int:
        """How many bytes less the files hold than the model's tensors whose names begin so."""
        return 0

    def widened(self, dtype: torch.dtype | None) -> AbstractContextManager[None]:
        """Inside, 16-bit weights are of this type; None leaves them."""
        return in_dtype(self.model, dtype)

    @contextmanager
    def walking(self, layers: list[MoELayer]) -> Iterator[None]:
        """Inside, forward passes run that stop in front of these layers' blocks."""
        yield

    def stopped(self, layer: MoELayer) -> None:
        """All batches wait in front of this layer's block, whose weights are wanted now."""

    def passed(self, layer: MoELayer) -> None:
        """All batches have left this layer's block behind."""

    @contextmanager
    def at_hand(self, layer: MoELayer) -> Iterator[None]:
        """Inside, the weights of this layer's block have values."""
        yield
