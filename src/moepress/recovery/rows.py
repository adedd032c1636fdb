"""Calibration batches as single rows, so that training can shuffle them and choose its own batch size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moepress.data.batches import NO_LABEL, next_token_labels
from moepress.errors import MoepressError
from moepress.models.walk import CalibrationBatch

Row = dict[str, Tensor]


def rows_of(batches: list[CalibrationBatch], objective: str) -> list[Row]:
    """The arguments of the forward pass for each row, and `labels` in the places of the logits.

    With the text objective a decoder-only model is asked for every token, also for those of a task's prompt.
    """
    rows: list[Row] = []
    for batch in batches:
        inputs = batch.inputs
        if objective == "text" and "decoder_input_ids" not in inputs:
            inputs = {name: tensor for name, tensor in inputs.items() if name != "labels"}
        labels_BL = next_token_labels(CalibrationBatch(inputs, batch.keep))
        for i, labels_L in enumerate(labels_BL):
            if bool((labels_L != NO_LABEL).any()):
                rows.append({name: tensor[i] for name, tensor in inputs.items()} | {"labels": labels_L})
    if not rows:
        raise MoepressError("there is nothing to recover on: no sample has a token to predict")
    return rows


def together(rows: list[Row]) -> Row:
    """Rows padded on the right to the longest. Padding is masked, so any token id will do."""
    return {
        name: torch.nn.utils.rnn.pad_sequence(
            [row[name] for row in rows], batch_first=True, padding_value=NO_LABEL if name == "labels" else 0
        )
        for name in rows[0]
    }


def endless(loader: Any) -> Iterator[Row]:
    while True:
        yield from loader
