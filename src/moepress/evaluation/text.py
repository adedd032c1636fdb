"""Perplexity, and the distance to the original, on text.

Shape suffixes: N windows, L tokens of a window, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moepress.data.batches import window_batches
from moepress.data.windows import Windows
from moepress.errors import MoepressError
from moepress.evaluation.logits import check_same_vocabulary, log_probabilities, logits_of, pieces
from moepress.evaluation.precision import evaluating
from moepress.evaluation.scores import Comparison, TextScore
from moepress.models.walk import CalibrationBatch
from moepress.progress import track

Score = TypeVar("Score", TextScore, Comparison)
Text = Windows | Tensor | list[CalibrationBatch]
"""Windows by domain, bare (N, L) windows, or batches."""


def perplexity(
    model: PreTrainedModel, windows: Text, *, batch_size: int = 8, dtype: torch.dtype | None = torch.float32
) -> TextScore:
    """How well the model predicts each next token, in all and per domain.

    An encoder–decoder model reads the first half of each window and continues it. `dtype`: precision of the forward
    pass for weights kept in 16 bits; None leaves them.
    """
    total = TextScore()
    batches = _batches(model, windows, batch_size)
    with evaluating(model, dtype=dtype):
        for batch in track(batches, "perplexity"):
            own = total.domains.setdefault(batch.domain, TextScore())
            for inputs, labels_BL in pieces(batch, model.config.get_text_config().vocab_size):
                for labels_T, logp_TV in log_probabilities(labels_BL, logits_of(model, inputs)):
                    chunk = _text_score(labels_T, logp_TV)
                    own.add(chunk)
                    total.add(chunk)
    _check(total.tokens)
    return _without_single(total)


def compare(
    model: PreTrainedModel,
    original: PreTrainedModel,
    windows: Text,
    *,
    batch_size: int = 8,
    dtype: torch.dtype | None = torch.float32,
) -> Comparison:
    """Mean KL(original || model) in nats per token, top-1 agreement and both perplexities, in all and per domain."""
    check_same_vocabulary(model, original)
    total = Comparison()
    batches = _batches(model, windows, batch_size)
    with evaluating(model, original, dtype=dtype):
        for batch in track(batches, "compare"):
            own = total.domains.setdefault(batch.domain, Comparison())
            for inputs, labels_BL in pieces(batch, model.config.get_text_config().vocab_size):
                logits = logits_of(model, inputs), logits_of(original, inputs)
                for labels_T, logp_TV, reference_TV in log_probabilities(labels_BL, *logits):
                    chunk = _comparison(labels_T, logp_TV, reference_TV)
                    own.add(chunk)
                    total.add(chunk)
    _check(total.tokens)
    return _without_single(total)


def _text_score(labels_T: Tensor, logp_TV: Tensor) -> TextScore:
    return TextScore(len(labels_T), -float(logp_TV.gather(1, labels_T[:, None]).double().sum()))


def _comparison(labels_T: Tensor, logp_TV: Tensor, reference_TV: Tensor) -> Comparison:
    return Comparison(
        _text_score(labels_T, logp_TV),
        _text_score(labels_T, reference_TV),
        kl_nats=float(kl_T(reference_TV, logp_TV).double().sum()),
        agreeing=int((logp_TV.argmax(-1) == reference_TV.argmax(-1)).sum()),
    )


def kl_T(reference_TV: Tensor, logp_TV: Tensor) -> Tensor:
    """KL(reference || other) of each row of log-probabilities."""
    return torch.nn.functional.kl_div(logp_TV, reference_TV, reduction="none", log_target=True).sum(-1)


def _batches(model: PreTrainedModel, windows: Text, batch_size: int) -> list[CalibrationBatch]:
    return windows if isinstance(windows, list) else window_batches(windows, model.config, batch_size)


def _check(tokens: int) -> None:
    if not tokens:
        raise MoepressError("there is no text to evaluate on: it holds no token with another before it")


def _without_single(score: Score) -> Score:
    """A breakdown into one domain says nothing new."""
    if len(score.domains) == 1:
        score.domains.clear()
    return score
