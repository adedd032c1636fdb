"""The logits of a batch, a bounded piece at a time.

Shape suffixes: B rows, L places of a row, T tokens that count, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moepress.data.batches import NO_LABEL, next_token_labels, vocabulary_of
from moepress.errors import MoepressError
from moepress.models.walk import CalibrationBatch

FORWARD_BYTES = 2**30
"""About how large the fp32 logits of one forward pass may be; a batch beyond it goes through in fewer rows at once."""
CHUNK_BYTES = 2**26
"""The same for the few copies that a softmax makes."""


def pieces(batch: CalibrationBatch, vocabulary: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """The batch in groups of rows: (arguments of the forward pass, next-token labels)."""
    labels_BL = next_token_labels(batch)
    rows = max(1, FORWARD_BYTES // (4 * labels_BL.shape[1] * vocabulary))
    inputs = {name: tensor for name, tensor in batch.inputs.items() if name != "labels"}
    for i in range(0, len(labels_BL), rows):
        yield {name: tensor[i : i + rows] for name, tensor in inputs.items()}, labels_BL[i : i + rows]


def logits_of(model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    device = next(model.parameters()).device
    return model(**{name: tensor.to(device) for name, tensor in inputs.items()}).logits


def log_probabilities(labels_BL: Tensor, *logits_BLV: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """(labels (T,), fp32 log-probabilities (T, V) of each model) of the places that have a label, in small chunks."""
    device = logits_BLV[0].device
    labels_T = labels_BL.reshape(-1).to(device)
    places = (labels_T != NO_LABEL).nonzero()[:, 0]
    flat = [logits.reshape(-1, logits.shape[-1]) for logits in logits_BLV]
    for chunk in places.split(max(1, CHUNK_BYTES // (4 * flat[0].shape[-1]))):
        chosen = [logits_TV[chunk.to(logits_TV.device)].to(device) for logits_TV in flat]
        yield labels_T[chunk], *(torch.log_softmax(logits_TV.float(), dim=-1) for logits_TV in chosen)


def check_same_vocabulary(model: Any, original: Any) -> None:
    own, other = vocabulary_of(model.config), vocabulary_of(original.config)
    if own != other:
        raise MoepressError(
            f"the model has a vocabulary of {own} and the original one of {other}: their predictions cannot be compared"
        )
