"""Accuracy on labelled tasks, by scoring each possible answer.

Shape suffixes: C choices of an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moepress.data.batches import NO_LABEL, answer_batches
from moepress.errors import MoepressError
from moepress.evaluation.logits import check_same_vocabulary, log_probabilities, logits_of, pieces
from moepress.evaluation.precision import evaluating
from moepress.evaluation.scores import TaskScore
from moepress.evaluation.text import kl_T
from moepress.progress import track
from moepress.tasks import Example, Task


def task_metrics(
    model: PreTrainedModel,
    task: Task,
    examples: Sequence[Example],
    against: PreTrainedModel | None = None,
    *,
    tokenizer: Any,
    batch_size: int = 32,
    length: int = 512,
    dtype: torch.dtype | None = torch.float32,
) -> TaskScore:
    """Accuracy when the model answers with the choice whose tokens it finds most probable together.

    With `against`, the original: its accuracy, the mean KL(original || model) of the distribution over the choices,
    and how often both answer the same.
    """
    if not examples:
        raise MoepressError(f"there are no examples of task {task.name!r} to evaluate on")
    scores = score_choices(model, task, examples, tokenizer, batch_size, length, dtype)
    right = [int(score_C.argmax()) == e.label for score_C, e in zip(scores, examples, strict=True)]
    accuracy = sum(right) / len(examples)
    if against is None:
        return TaskScore(task.name, len(examples), accuracy)
    check_same_vocabulary(model, against)
    references = score_choices(against, task, examples, tokenizer, batch_size, length, dtype)
    both = list(zip(scores, references, strict=True))
    return TaskScore(
        task.name,
        len(examples),
        accuracy,
        sum(int(r.argmax()) == e.label for r, e in zip(references, examples, strict=True)) / len(examples),
        sum(float(kl_T(r.log_softmax(-1), s.log_softmax(-1))) for s, r in both) / len(examples),
        sum(int(s.argmax() == r.argmax()) for s, r in both) / len(examples),
    )


def score_choices(
    model: PreTrainedModel,
    task: Task,
    examples: Sequence[Example],
    tokenizer: Any,
    batch_size: int = 32,
    length: int = 512,
    dtype: torch.dtype | None = torch.float32,
) -> list[Tensor]:
    """For each example the log-probability of each choice: the sum over all its tokens, in fp64."""
    pairs = [(example.prompt, choice) for example in examples for choice in example.choices]
    batches = answer_batches(pairs, tokenizer, model.config, batch_size, length, task.separator)
    sums: list[float] = []
    with evaluating(model, dtype=dtype):
        for batch in track(batches, f"task {task.name}"):
            for inputs, labels_BL in pieces(batch, model.config.get_text_config().vocab_size):
                sums += _row_sums(labels_BL, logits_of(model, inputs)).tolist()
    scores = iter(sums)
    return [torch.tensor([next(scores) for _ in example.choices], dtype=torch.float64) for example in examples]


def _row_sums(labels_BL: Tensor, logits_BLV: Tensor) -> Tensor:
    """Log-probability of the labels of each row."""
    chunks = log_probabilities(labels_BL, logits_BLV)
    scores_T = torch.cat([logp_TV.gather(1, labels_T[:, None])[:, 0] for labels_T, logp_TV in chunks])
    row_T = (labels_BL != NO_LABEL).nonzero()[:, 0]
    sums_B = torch.zeros(len(labels_BL), dtype=torch.float64)
    return sums_B.index_add(0, row_T.cpu(), scores_T.double().cpu())
