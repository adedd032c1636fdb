"""A model as it is evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from moepress.models.precision import in_dtype


@contextmanager
def evaluating(*models: nn.Module | None, dtype: torch.dtype | None = torch.float32) -> Iterator[None]:
    """No gradients, no dropout, and `dtype` for 16-bit weights; afterwards everything is as it was."""
    given = list({id(model): model for model in models if model is not None}.values())
    training = [model.training for model in given]
    with torch.no_grad(), ExitStack() as stack:
        for model in given:
            stack.enter_context(in_dtype(model, dtype))
            model.eval()
        try:
            yield
        finally:
            for model, was in zip(given, training, strict=True):
                model.train(was)
