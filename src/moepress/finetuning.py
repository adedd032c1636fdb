"""The full model that teaches a smaller one: a pretrained model fine-tuned on a labelled task."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moepress.api import open_source
from moepress.data.examples import task_examples
from moepress.errors import MoepressError
from moepress.evaluation import task_metrics
from moepress.recovery import RecoverReport
from moepress.recovery import recover as train
from moepress.recovery.sharding import load_everywhere
from moepress.training import (
    AnyPath,
    Recovered,
    claim,
    discard,
    is_main,
    make_options,
    read,
    record,
    steps_of,
    write,
)

PAPER_GRID = {"lr": (3e-4, 1e-4, 3e-5, 1e-5), "batch_size": (8, 16, 32, 64), "epochs": (3.0, 5.0, 10.0, 20.0)}
"""What the MC-SMoE paper searches through, for each task."""
PAPER_CHOICES = {
    "sst2": (1e-4, 64),
    "mrpc": (5e-5, 32),
    "multirc": (3e-5, 32),
    "copa": (3e-5, 8),
    "winogrande": (1e-5, 32),
    "squad": (5e-5, 16),
    "wikiqa": (5e-5, 32),
    "hotpotqa": (1e-4, 32),
}
"""Learning rate and batch size by task, from the authors' repository; they name no epochs."""
OTHERWISE = (1e-4, 32)
EPOCHS = 3.0


@dataclass
class Finetuned(Recovered):
    """The result of `finetune`; `search` has one row for each setting that was tried."""

    search: list[dict[str, Any]] = field(default_factory=list)


def finetune(
    model: AnyPath | PreTrainedModel,
    out: AnyPath | None = None,
    *,
    task: str,
    lr: float | Sequence[float] | None = None,
    batch_size: int | Sequence[int] | None = None,
    epochs: float | Sequence[float] | None = None,
    search: bool = False,
    samples: int | str = "all",
    length: int = 512,
    tokenizer: Any = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str | None = None,
    max_shard_size: int | str = "5GB",
    **options: Any,
) -> Finetuned:
    """Fine-tune a pretrained model on a labelled task, for instance to be the teacher of a compressed one.

    Learning rate and batch size are by default those that the MC-SMoE authors found for the task, the epochs 3. Where
    several values are given, all combinations are trained, each from the same pretrained weights, and the one with the
    best metric on the validation split is kept; `search` tries the paper's whole grid of what is not given.
    """
    name, _, folder = task.partition("@")
    usual = PAPER_CHOICES.get(name, OTHERWISE)
    values = {
        "lr": several("lr", lr, search, usual[0]),
        "batch_size": several("batch_size", batch_size, search, usual[1]),
        "epochs": several("epochs", epochs, search, EPOCHS),
    }
    settings = [dict(zip(values, chosen)) for chosen in product(*values.values())]
    given = {"objective": "task", "alpha": 0.0} | options
    asked = [make_options(given | {n: v for n, v in s.items() if n != "epochs"}, device) for s in settings]
    source = None if isinstance(model, PreTrainedModel) else model
    state = None if out is None else claim(out, overwrite, source, resume)
    tried = Search(state, values, resume)
    load_everywhere()
    loaded, tokenizer, _ = open_source(model, tokenizer, None, False, None)
    learnt, judged = read(None, task, samples, length, tokenizer, loaded, asked[0])
    chosen, examples = task_examples(name, "validation", folder or None)
    pretrained = {key: tensor.detach().clone() for key, tensor in loaded.state_dict().items()}
    for number, setting in enumerate(settings):
        if number < len(tried.rows):
            continue
        loaded.load_state_dict(pretrained)
        steps = steps_of(setting["epochs"], learnt, setting["batch_size"])
        here = None if state is None else state / f"run-{number}"
        run = replace(asked[number], steps=steps)
        report = train(loaded, None, learnt, run, held_out=judged, state=here, resume=resume)
        score = task_metrics(loaded, chosen, examples, tokenizer=tokenizer, length=length)
        row = {**setting, "steps": steps, "value": score.value, "score": score.to_dict()}
        tried.add(row | {"options": run.decisive(), "report": report.to_dict()}, loaded)
    loaded.load_state_dict(tried.weights)
    winner = tried.best
    report = RecoverReport(**{n: v for n, v in winner["report"].items() if n != "steps"})
    rows = [{n: v for n, v in row.items() if n not in ("options", "report")} for row in tried.rows]
    made = record(model, None, f"task:{task}", samples, length, winner["options"], report) | {"search": rows}
    result = Finetuned(loaded, report, made, search=rows)
    if out is not None:
        result.folder = Path(out)
        write(loaded, result.folder, source, [made], overwrite, max_shard_size)
        discard(state)
    return result


def several(name: str, given: Any, search: bool, usual: float) -> tuple[Any, ...]:
    if given is None:
        return PAPER_GRID[name] if search else (usual,)
    values = tuple(given) if isinstance(given, Sequence) else (given,)
    if not values:
        raise MoepressError(f"finetune: {name} is an empty list")
    return values


class Search:
    """The settings that were tried so far and the weights of the best, also on disk if there is a folder for them."""

    def __init__(self, folder: Path | None, values: dict[str, Any], resume: bool) -> None:
        self.folder, self.values = folder, json.loads(json.dumps(values))
        self.rows: list[dict[str, Any]] = []
        self.weights: dict[str, Tensor] = {}
        if folder is None or not self.file.exists():
            return
        if not resume:
            raise MoepressError(f"{folder} holds an interrupted search: go on with it (resume), or remove that folder")
        saved = json.loads(self.file.read_text())
        if saved["values"] != self.values:
            raise MoepressError(f"the search in {folder} was started with {saved['values']}, not {self.values}")
        self.rows = saved["rows"]
        self.weights = torch.load(folder / f"best-{self.rows.index(self.best)}.pt", weights_only=True)

    @property
    def file(self) -> Path:
        assert self.folder is not None
        return self.folder / "search.json"

    @property
    def best(self) -> dict[str, Any]:
        """The first of the best."""
        return max(self.rows, key=lambda row: row["value"])

    def add(self, row: dict[str, Any], model: PreTrainedModel) -> None:
        self.rows.append(row)
        if self.best is row:
            self.weights = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
        if self.folder is None or not is_main():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.best is row:  # before the file that says so
            torch.save(self.weights, self.folder / f"best-{len(self.rows) - 1}.pt")
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps({"values": self.values, "rows": self.rows}, indent=1))
        os.replace(partial, self.file)
        for old in self.folder.glob("best-*.pt"):
            if old.name != f"best-{self.rows.index(self.best)}.pt":
                old.unlink()
