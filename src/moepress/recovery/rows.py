"""Calibration batches as single rows, so that training can shuffle them and choose its own batch size."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

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
        if labels_BL.is_floating_point():
            raise MoepressError(f"labels must be token ids, not {str(labels_BL.dtype).removeprefix('torch.')}")
        for i, labels_L in enumerate(labels_BL):
            if bool((labels_L != NO_LABEL).any()):
                rows.append({name: tensor[i] for name, tensor in inputs.items()} | {"labels": labels_L})
    if not rows:
        raise MoepressError("there is nothing to recover on: no sample has a token to predict")
    return rows


def held_apart(rows: list[Row], share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Rows to learn from and rows to judge by: a share of them, at least one."""
    if not share or len(rows) < 2:
        return rows, []
    count = min(len(rows) - 1, max(1, round(share * len(rows))))
    chosen = set(torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count].tolist())
    return [r for i, r in enumerate(rows) if i not in chosen], [r for i, r in enumerate(rows) if i in chosen]


def together(rows: list[Row]) -> Row:
    """Rows padded on the right to the longest. Padding is masked, so any token id will do."""
    return {
        name: torch.nn.utils.rnn.pad_sequence(
            [row[name] for row in rows], batch_first=True, padding_value=NO_LABEL if name == "labels" else 0
        )
        for name in rows[0]
    }


def targets(row: Row) -> int:
    """How many tokens a row asks for."""
    return int((row["labels"] != NO_LABEL).sum())


def silent(row: Row) -> Row:
    """The row without anything to predict: it keeps a process busy that has run out of rows."""
    return row | {"labels": torch.full_like(row["labels"], NO_LABEL)}


def digest(rows: list[Row]) -> str:
    """A short name for exactly these rows."""
    sums = hashlib.sha256()
    for row in rows:
        for name in sorted(row):
            sums.update(name.encode() + row[name].long().numpy().tobytes())
    return sums.hexdigest()[:16]


@dataclass(frozen=True)
class Order:
    """Which rows a step learns from, known for every step beforehand: all rows once in random order, then again."""

    rows: int
    batch: int
    seed: int

    def __call__(self, step: int) -> list[int]:
        """The rows of a step, which counts from 1."""
        places = range((step - 1) * self.batch, step * self.batch)
        return [_epoch(self.rows, self.seed, place // self.rows)[place % self.rows] for place in places]


@lru_cache(maxsize=4)
def _epoch(rows: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(rows, generator=generator).tolist()
