"""Labelled tasks: answers chosen by their probability, or written and compared with the right ones.

Shape suffixes: B rows, L places of a row, T places that count, V vocabulary, C choices of an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moepress.data.batches import (
    NO_LABEL,
    answer_batches,
    is_encoder_decoder,
    pad_id,
    padded,
    to_batches,
    vocabulary_of,
)
from moepress.data.samples import Sample
from moepress.errors import MoepressError
from moepress.evaluation.logits import check_same_vocabulary, log_probabilities, logits_of, pieces
from moepress.evaluation.metrics import same_words, task_scores, written_scores
from moepress.evaluation.precision import evaluating
from moepress.evaluation.scores import TaskScore
from moepress.evaluation.text import kl_T
from moepress.evaluation.written import choice_named, forced_answers, written_answers
from moepress.progress import track
from moepress.registry import did_you_mean
from moepress.tasks import Example, Task

Scoring = Literal["sum", "mean", "paper", "teacher-forced"]


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
    scoring: Scoring | None = None,
) -> TaskScore:
    """The task's metrics. With `against`, the original: its metrics, and how often both answer the same.

    Where a task has choices the model answers with the one that it finds most probable: all its tokens together
    (`sum`, the default), each token on average (`mean`), or prompt and choice as one text (`paper`, as MC-SMoE scores
    decoder-only models; lines end in eos). There `against` also gives the mean KL(original || model) of the
    distribution over the choices. Other tasks are answered in the model's own writing. `teacher-forced`: the authors'
    numbers, see `forced_answers`.
    """
    if not examples:
        raise MoepressError(f"there are no examples of task {task.name!r} to evaluate on")
    check_scoring(model, task, scoring)
    if against is not None:
        check_same_vocabulary(model, against)
    given = (task, examples, tokenizer, batch_size, length)
    models = [model] if against is None else [model, against]
    if task.kind == "written" or scoring == "teacher-forced":
        answers = [_words(one, *given, dtype, scoring) for one in models]
        metrics = [_metrics_of_words(task, examples, texts, scoring) for texts in answers]
        same = [same_words(own, other) for own, other in zip(answers[0], answers[-1], strict=True)]
        kl = None
    else:
        scores = [score_choices(one, *given, dtype, scoring or "sum") for one in models]
        chosen = [[int(score_C.argmax()) for score_C in own] for own in scores]
        metrics = [task_scores(task, examples, own) for own in chosen]
        same = [own == other for own, other in zip(chosen[0], chosen[-1], strict=True)]
        pairs = zip(scores[-1], scores[0], strict=True)
        kl = sum(float(kl_T(r.log_softmax(-1), s.log_softmax(-1))) for r, s in pairs) / len(examples)
    if against is None:
        return TaskScore(task.name, len(examples), metrics[0])
    return TaskScore(task.name, len(examples), metrics[0], metrics[1], kl, sum(same) / len(examples))


def check_scoring(model: PreTrainedModel, task: Task, scoring: str | None) -> None:
    if scoring not in (None, *get_args(Scoring)):
        raise MoepressError(f"unknown scoring {scoring!r}: {did_you_mean(str(scoring), list(get_args(Scoring)))}")
    if task.kind == "written" and scoring not in (None, "teacher-forced"):
        raise MoepressError(f"task {task.name!r} has no choices to score: it is answered in the model's own writing")
    if scoring == "paper" and is_encoder_decoder(model.config):
        raise MoepressError("scoring 'paper' is for decoder-only models; the authors' way here is 'teacher-forced'")


def _words(
    model: PreTrainedModel,
    task: Task,
    examples: Sequence[Example],
    tokenizer: Any,
    batch_size: int,
    length: int,
    dtype: torch.dtype | None,
    scoring: str | None,
) -> list[str]:
    if scoring == "teacher-forced":
        return forced_answers(model, task, examples, tokenizer, batch_size, length, dtype)
    return written_answers(model, task, examples, tokenizer, batch_size, length, dtype=dtype)


def _metrics_of_words(
    task: Task, examples: Sequence[Example], texts: Sequence[str], scoring: str | None
) -> dict[str, float]:
    if task.kind == "choice":
        return task_scores(task, examples, [choice_named(e, text) for e, text in zip(examples, texts, strict=True)])
    references = [example.references[: 1 if scoring else None] for example in examples]  # theirs is one reference
    return written_scores(task, references, texts)


def score_choices(
    model: PreTrainedModel,
    task: Task,
    examples: Sequence[Example],
    tokenizer: Any,
    batch_size: int = 32,
    length: int = 512,
    dtype: torch.dtype | None = torch.float32,
    scoring: str = "sum",
) -> list[Tensor]:
    """For each example the log-probability of each choice, in fp64."""
    pairs = [(example.prompt, choice) for example in examples for choice in example.choices]
    values: list[float] = []
    with evaluating(model, dtype=dtype):
        if scoring == "paper":
            values = _whole_texts(model, pairs, tokenizer, batch_size, length)
        else:
            batches = answer_batches(pairs, tokenizer, model.config, batch_size, length, task.separator)
            for batch in track(batches, f"task {task.name}"):
                for inputs, labels_BL in pieces(batch, vocabulary_of(model.config)):
                    sums_B, counts_B = _row_sums(labels_BL, logits_of(model, inputs))
                    values += (sums_B / counts_B if scoring == "mean" else sums_B).tolist()
    scores = iter(values)
    return [torch.tensor([next(scores) for _ in example.choices], dtype=torch.float64) for example in examples]


def _whole_texts(
    model: PreTrainedModel, pairs: list[tuple[str, str]], tokenizer: Any, batch_size: int, length: int
) -> list[float]:
    """The mean log-probability of prompt and choice together, as the authors compute it: every line break is an eos,
    and behind the last token there is one more place, in which padding is expected."""
    if tokenizer is None or tokenizer.eos_token is None:
        raise MoepressError("scoring 'paper' puts eos for line breaks, and the tokenizer has no eos token")
    eos, pad = tokenizer.eos_token, pad_id(tokenizer, model.config)
    texts = [f"{prompt}\n{choice}".replace("\n", eos) + eos for prompt, choice in pairs]
    rows = [tokenizer(text, verbose=False)["input_ids"][-length:] for text in texts]
    values: list[float] = []
    for batch in track(to_batches([Sample(row, row) for row in rows], model.config, batch_size, pad), "score"):
        for inputs, _ in pieces(batch, vocabulary_of(model.config)):
            lengths = inputs["attention_mask"].sum(1).tolist()
            rows_here = [ids[:n].tolist() for ids, n in zip(inputs["input_ids"], lengths, strict=True)]
            labels_BL = padded([[*row[1:], pad] for row in rows_here], NO_LABEL)
            logits_BLV = logits_of(model, inputs)[:, : labels_BL.shape[1]]
            sums_B, counts_B = _row_sums(labels_BL, logits_BLV)
            values += (sums_B / counts_B).tolist()
    return values


def _row_sums(labels_BL: Tensor, logits_BLV: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of the labels of each row, and their number."""
    chunks = log_probabilities(labels_BL, logits_BLV)
    scores_T = torch.cat([logp_TV.gather(1, labels_T[:, None])[:, 0] for labels_T, logp_TV in chunks])
    row_T = (labels_BL != NO_LABEL).nonzero()[:, 0]
    sums_B = torch.zeros(len(labels_BL), dtype=torch.float64)
    return sums_B.index_add(0, row_T.cpu(), scores_T.double().cpu()), (labels_BL != NO_LABEL).sum(1).double().cpu()
