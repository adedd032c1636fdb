"""What the teacher answers: computed at each step, or computed once and kept on disk.

Shape suffixes: T places that have a label, V vocabulary, K the most probable tokens.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moepress.checkpoint.sizes import human_size
from moepress.data.batches import vocabulary_of
from moepress.errors import MoepressError
from moepress.evaluation.precision import evaluating
from moepress.progress import track
from moepress.recovery.loss import Likeliest, at_targets, likeliest
from moepress.recovery.rows import Row, targets, together


class Answers(Protocol):
    """`answers(numbers, batch)`: the teacher's logits at the labelled places of these rows, in their order."""

    bytes: int

    def __call__(self, numbers: Sequence[int], batch: Row) -> Tensor | Likeliest: ...


class Live:
    bytes = 0

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, numbers: Sequence[int], batch: Row) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        with evaluating(self.model, dtype=None):
            return at_targets(self.model(**inputs).logits, batch["labels"])


class Remembered:
    """The answers for some numbered rows, in files that all processes of a machine share."""

    def __init__(
        self,
        live: Live,
        rows: list[Row],
        numbers: Sequence[int],
        kept: str | int,
        temperature: float,
        folder: Path,
        accelerator: Any,
        at_once: int,
    ) -> None:
        self.kept, self.temperature = kept, temperature
        vocabulary = vocabulary_of(live.model.config)
        self.width = vocabulary if kept == "full" else min(int(kept), vocabulary)
        self.places: dict[int, slice] = {}
        total = 0
        for number in sorted(set(numbers)):
            self.places[number] = slice(total, total + targets(rows[number]))
            total += targets(rows[number])
        self.kinds = {"logits": np.float32} if kept == "full" else {"ids": np.int32, "logp": np.float32}
        self.bytes = sum(total * self.width * np.dtype(kind).itemsize for kind in self.kinds.values())
        if accelerator.is_main_process:
            make_room(folder, self.bytes)
            for name, kind in self.kinds.items():
                np.memmap(folder / f"{name}.bin", kind, "w+", shape=(total, self.width)).flush()
        accelerator.wait_for_everyone()
        self.files = {
            name: np.memmap(folder / f"{name}.bin", kind, "r+", shape=(total, self.width))
            for name, kind in self.kinds.items()
        }
        mine = sorted(self.places, key=lambda i: len(rows[i]["input_ids"]))
        mine = mine[accelerator.process_index :: accelerator.num_processes]
        groups = [mine[i : i + at_once] for i in range(0, len(mine), at_once)]
        for group in track(groups, f"teacher's outputs, {human_size(self.bytes)}"):
            batch = together([rows[i] for i in group])
            answer_TV = live(group, {name: tensor.to(accelerator.device) for name, tensor in batch.items()})
            self.write(group, answer_TV)
        for file in self.files.values():
            file.flush()
        accelerator.wait_for_everyone()

    def write(self, group: list[int], answer_TV: Tensor) -> None:
        if self.kept == "full":
            parts = {"logits": answer_TV.cpu()}
        else:
            top = likeliest(answer_TV, self.width, self.temperature)
            parts = {"ids": top.ids_TK.int().cpu(), "logp": top.logp_TK.cpu()}
        start = 0
        for number in group:
            place = self.places[number]
            length = place.stop - place.start
            for name, tensor in parts.items():
                self.files[name][place] = tensor[start : start + length].numpy()
            start += length

    def read(self, name: str, numbers: Sequence[int]) -> Tensor:
        parts = [self.files[name][self.places[number]] for number in numbers]
        return torch.from_numpy(np.concatenate(parts) if parts else np.empty((0, self.width), self.kinds[name]))

    def __call__(self, numbers: Sequence[int], batch: Row) -> Tensor | Likeliest:
        if self.kept == "full":
            return self.read("logits", numbers)
        return Likeliest(self.read("ids", numbers).long(), self.read("logp", numbers))


def make_room(folder: Path, size: int) -> None:
    """The folder, if the disk has room for so many bytes there."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if size > free:
        raise MoepressError(
            f"the teacher's outputs would take {human_size(size)}, and the disk has {human_size(free)} left: "
            "keep fewer of the most probable tokens (cache=64), or none (cache=none)"
        )
