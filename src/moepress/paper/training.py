"""The training that rows of a table have: the full model's on a task, and the recovery of what was compressed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from moepress.decompose.gradual import GradualPruning
from moepress.decompose.schedule import Schedule
from moepress.finetuning import finetune
from moepress.hook import TrainingHook
from moepress.models.layer import CompactSpec
from moepress.paper.asked import Asked, Column
from moepress.paper.models import RATIO
from moepress.paper.tables import Row
from moepress.prune import ProgressivePruning
from moepress.training import recover


def on_task(model: str, column: Column, asked: Asked, folder: Path) -> str:
    """Where the model lies that was fine-tuned on a column's task: made once, and gone on with if interrupted."""
    if not asked.finetune or column.text is not None:
        return model
    out = folder / f"{Path(model).name}-{column.name}"
    if not out.is_dir():
        state = out.with_name(f".{out.name}.training")
        finetune(
            model,
            out,
            task=column.place,
            epochs=asked.finetune,
            samples=asked.train_samples,
            length=asked.length,
            device=asked.device,
            resume=state.is_dir(),
        )
    return str(out)


def recovered(
    model: PreTrainedModel,
    original: PreTrainedModel,
    row: Row,
    column: Column,
    seed: int,
    asked: Asked,
    tokenizer: Any,
    specs: dict[str, CompactSpec],
    skipped: set[str],
    keep: int | float,
) -> None:
    """Train it in place, as the paper does: cross-entropy and the KL to the full model; routers stay as they are."""
    hook: TrainingHook | None = None
    if row.schedule:
        hook = GradualPruning(model, Schedule(RATIO, asked.steps, row.schedule))  # type: ignore[arg-type]
    elif row.dies_out:
        hook = ProgressivePruning(model, keep, asked.steps, skip=skipped)
    options: dict[str, Any] = {"objective": "task", "train": "all-but-router", "lr": asked.lr, **row.training}
    recover(
        model,
        teacher=original if options.get("alpha", 1) else None,
        tokenizer=tokenizer,
        samples=asked.train_samples,
        length=asked.length,
        steps=asked.steps,
        batch_size=asked.train_batch_size,
        seed=seed,
        hooks=[] if hook is None else [hook],
        device=asked.device,
        data=None if column.text is None else column.calibration,
        task=None if column.text is not None else column.place,
        **options,
    )
    if isinstance(hook, GradualPruning):
        hook.remove(specs)
    elif isinstance(hook, ProgressivePruning):
        hook.remove()
