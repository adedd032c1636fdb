"""How good a model is in a column of a table, beside the original."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from moepress.data.batches import CalibrationData, calibration_batches
from moepress.data.examples import task_examples
from moepress.errors import MoepressError
from moepress.evaluation import compare, task_metrics
from moepress.evaluation.task import check_scoring
from moepress.paper.asked import Asked, Column

Judge = Callable[[PreTrainedModel], dict[str, Any]]
"""What a model is worth: `value` is what rows are compared by, `better` says which way, `shown` what people see."""


def judge_of(column: Column, asked: Asked, original: PreTrainedModel, tokenizer: Any) -> Judge:
    """Reads the held-out text, so that nothing that can be refused is left for later."""
    if column.text is None:
        return _task_judge(column, asked, original, tokenizer)
    options = CalibrationData(
        source=column.text,
        samples=asked.limit,  # type: ignore[arg-type]
        length=asked.length,
        batch_size=asked.batch_size,
    )
    shift = getattr(original, "prepare_decoder_input_ids_from_labels", None)
    batches = calibration_batches(options, tokenizer, original.config, split="validation", shift=shift)

    def judge(model: PreTrainedModel) -> dict[str, Any]:
        score = compare(model, original, batches)
        loss = score.model.loss
        return {
            "value": loss if asked.steps else score.kl,  # what was trained need not say what the original says
            "better": "lower",
            "shown": {"loss": loss, "KL": score.kl},
            "more": score.to_dict() | {"perplexity": math.exp(min(loss, 700.0))},
        }

    return judge


def _task_judge(column: Column, asked: Asked, original: PreTrainedModel, tokenizer: Any) -> Judge:
    name, _, folder = column.place.partition("@")
    limit = None if asked.limit == "all" else int(asked.limit)
    task, examples = task_examples(name, "validation", folder or None, limit)
    check_scoring(original, task, asked.scoring)
    if tokenizer is None:
        raise MoepressError(f"task {name!r} is text, and the model has no tokenizer to read it")

    def judge(model: PreTrainedModel) -> dict[str, Any]:
        score = task_metrics(
            model,
            task,
            examples,
            original,
            tokenizer=tokenizer,
            batch_size=asked.batch_size,
            length=asked.length,
            scoring=asked.scoring,  # type: ignore[arg-type]
        )
        shown = {f"{name} {metric} %": 100 * value for metric, value in score.metrics.items()}
        if score.kl is not None:
            shown[f"{name} KL"] = score.kl
        return {"value": 100 * score.value, "better": "higher", "shown": shown, "more": score.to_dict()}

    return judge
