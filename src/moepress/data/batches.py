"""Tokenised batches: what every model in moepress is run on.

Shape suffixes: B rows of a batch, L tokens of a row, N windows.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import torch
from torch import Tensor

from moepress.data.samples import (
    TYPICAL_DOCUMENT,
    Encoder,
    Sample,
    choose,
    document_samples,
    example_samples,
    packed_samples,
)
from moepress.data.sources import Document, source_documents
from moepress.data.spec import Source, parse_sources, shares
from moepress.data.windows import Windows, check_ids, read_windows
from moepress.errors import MoepressError
from moepress.models.walk import CalibrationBatch

logger = logging.getLogger(__name__)

NO_LABEL = -100
PACKED_POOL = 4
"""Packed windows are drawn from this many times as many."""
LONGEST = ("max_position_embeddings", "n_positions", "max_sequence_length")


@dataclass(frozen=True)
class CalibrationData:
    """Which text a model is calibrated on, and how it is cut."""

    source: str = ""
    """A .jsonl, .json or .txt file (also .gz, .xz), hub:name:split, task:name, a .safetensors file of windows, or a
    mixture such as a.jsonl:0.3,b.jsonl:0.7."""
    samples: int | Literal["all"] = 256
    length: int = 512
    """Tokens of a sample; windows that come ready-made keep theirs."""
    batch_size: int = 8
    chat_template: bool | None = None
    """None: messages are rendered by the tokenizer's template; false: joined as plain text; true: tasks as well."""
    text_field: str | None = None
    pack: Literal["document", "window"] = "document"
    """One document a sample, cut or padded; or documents strung together and cut into full windows."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples != "all" and (not isinstance(self.samples, int) or self.samples < 1):
            raise MoepressError(f"samples must be a positive number or 'all', not {self.samples!r}")
        for name, least in (("length", 2), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise MoepressError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.pack not in ("document", "window"):
            raise MoepressError(f"pack must be 'document' or 'window', not {self.pack!r}")


def calibration_batches(
    options: CalibrationData,
    tokenizer: Any,
    model_config: Any,
    *,
    split: str = "train",
    shift: Callable[[Tensor], Tensor] | None = None,
) -> list[CalibrationBatch]:
    """The batches that `options` describe; the same options and seed give the same batches.

    A batch holds samples of one domain, padded on the right to its longest. `inputs` has `labels`: the next tokens of
    plain text, the answers of a task, -100 where the model is not asked. `shift` makes decoder inputs from labels in
    an encoder–decoder model (`model.prepare_decoder_input_ids_from_labels`); by default the config's start token is
    put in front, which is what those models do.
    """
    sources = parse_sources(options.source)
    counts: list[int] | list[None] = [None] * len(sources)
    if options.samples != "all":
        counts = shares(sources, options.samples)
    elif len({source.weight for source in sources}) > 1:
        raise MoepressError("a mixture with weights needs a number of samples, not 'all'")
    samples: list[Sample] = []
    for number, (source, count) in enumerate(zip(sources, counts, strict=True)):
        random = Random(f"{options.seed}/{number}")
        drawn = _draw(source, count, options, tokenizer, model_config, split, random)
        if count is not None and len(drawn) < count:
            logger.warning("%s gives %d samples; %d were asked for", source.location, len(drawn), count)
        samples += drawn if len(sources) == 1 else [Sample(s.ids, s.target, source.name) for s in drawn]
    pad = pad_id(tokenizer, model_config)
    return to_batches(samples, model_config, options.batch_size, pad, shift)


def fingerprint_of(batches: list[CalibrationBatch]) -> str:
    """The same for the same batches in the same order."""
    found = hashlib.sha256()
    for batch in batches:
        for name, tensor in sorted(batch.inputs.items()):
            found.update(f"{name} {tuple(tensor.shape)} {batch.domain}\n".encode())
            found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def window_batches(
    windows: Windows | Tensor, model_config: Any, batch_size: int = 8, shift: Callable[[Tensor], Tensor] | None = None
) -> list[CalibrationBatch]:
    """Ready-made (N, L) windows as they are, one domain after the other; half and half for encoder–decoder models."""
    named = {"": windows} if isinstance(windows, Tensor) else windows
    samples = [sample for domain, ids_NL in named.items() for sample in _window_samples(ids_NL, domain, model_config)]
    return to_batches(samples, model_config, batch_size, 0, shift)


def answer_batches(
    pairs: list[tuple[str, str]], tokenizer: Any, model_config: Any, batch_size: int, length: int, separator: str = " "
) -> list[CalibrationBatch]:
    """Prompts with an answer each, in order; the labels are the answers. One text in a decoder-only model."""
    encoder = Encoder(tokenizer, _eos(tokenizer, model_config), length, is_encoder_decoder(model_config))
    documents = (Document(prompt, "", answer, separator) for prompt, answer in pairs)
    samples = [encoder.example(document, end=False) for document in documents]
    return to_batches(samples, model_config, batch_size, pad_id(tokenizer, model_config))


def prompt_batches(
    prompts: list[str], tokenizer: Any, model_config: Any, batch_size: int, length: int
) -> list[dict[str, Tensor]]:
    """Prompts to be continued, in order: padded on the left, so that each ends where its continuation begins; in an
    encoder–decoder model on the right. What is too long loses its beginning, or there its end."""
    encoder = Encoder(tokenizer, _eos(tokenizer, model_config), length, is_encoder_decoder(model_config))
    pad = pad_id(tokenizer, model_config)
    if encoder.encoder_decoder:
        rows = [encoder.ended(encoder.tokens(prompt), length) for prompt in prompts]
    else:
        rows = [encoder.open_ended(encoder.tokens(prompt))[-length:] for prompt in prompts]
    batches = []
    for i in range(0, len(rows), batch_size):
        some = rows[i : i + batch_size]
        sides = some if encoder.encoder_decoder else [row[::-1] for row in some]
        ids_BL, real_BL = padded(sides, pad), padded([[1] * len(row) for row in some], 0)
        if not encoder.encoder_decoder:
            ids_BL, real_BL = ids_BL.flip(1), real_BL.flip(1)
        batches.append({"input_ids": ids_BL, "attention_mask": real_BL})
    return batches


def _draw(
    source: Source,
    count: int | None,
    options: CalibrationData,
    tokenizer: Any,
    config: Any,
    split: str,
    random: Random,
) -> list[Sample]:
    """The samples of one source; `count=None`: all of them, in order."""
    if source.kind == "windows":
        windows = read_windows(source.location)
        samples = [s for domain, ids_NL in windows.items() for s in _window_samples(ids_NL, domain, config)]
        return _some(samples, count, random)
    if tokenizer is None:
        raise MoepressError(f"{source.location} holds text, and the model has no tokenizer to read it")
    if source.kind == "hub" and count is None:
        raise MoepressError(f"hub:{source.location} may not end: give a number of samples, not 'all'")
    if source.kind == "task" and options.pack == "window":
        raise MoepressError(f"the examples of task {source.name!r} are not packed: use pack=document")
    _check_length(options.length, config, "length")
    documents = source_documents(source, tokenizer, options.text_field, options.chat_template, split, options.seed)
    if source.kind != "hub" and count is not None:  # a Hub stream is shuffled already and is never read to its end
        packed = count * options.length // TYPICAL_DOCUMENT if options.pack == "window" else 0
        documents = iter(choose(documents, max(2 * count + 64, packed), random))
    encoder = Encoder(tokenizer, _eos(tokenizer, config), options.length, is_encoder_decoder(config))
    if source.kind == "task":
        return list(example_samples(documents, encoder, count))
    if options.pack == "document":
        samples = list(document_samples(documents, encoder, count))
    else:  # a few long documents would fill all windows, so that windows are drawn from several times as many
        pool = packed_samples(documents, encoder, None if count is None else PACKED_POOL * count)
        samples = _some(list(pool), count, random)
    if not samples or encoder.tokens_seen < options.length:
        # With less than one window most experts see nothing.
        raise MoepressError(
            f"{source.location} holds {encoder.tokens_seen} tokens (documents: {encoder.documents}); at least "
            f"{options.length} are needed for one window of length {options.length}: give more text or a smaller length"
        )
    return samples


def _some(samples: list[Sample], count: int | None, random: Random) -> list[Sample]:
    """`count` of the samples at random, in their order; all, if there are no more."""
    if count is None or count >= len(samples):
        return samples
    return [samples[i] for i in sorted(random.sample(range(len(samples)), count))]


def _window_samples(ids_NL: Tensor, domain: str, config: Any) -> list[Sample]:
    check_ids(ids_NL, vocabulary_of(config), f"the windows of {domain!r}" if domain else "the windows")
    _check_length(ids_NL.shape[1], config, "the windows' length")
    if not is_encoder_decoder(config):
        return [Sample(row, row, domain) for row in ids_NL.tolist()]
    half = ids_NL.shape[1] // 2
    return [Sample(row[:half], row[half:], domain) for row in ids_NL.tolist()]


def to_batches(
    samples: list[Sample],
    config: Any,
    batch_size: int,
    pad: int = 0,
    shift: Callable[[Tensor], Tensor] | None = None,
) -> list[CalibrationBatch]:
    """Samples of one domain together, domains in the order in which they first appear."""
    by_domain: dict[str, list[Sample]] = {}
    for sample in samples:
        by_domain.setdefault(sample.domain, []).append(sample)
    if not samples:
        raise MoepressError("there is no calibration text: 0 samples")
    return [
        collate(rows[i : i + batch_size], config, pad, shift)
        for rows in by_domain.values()
        for i in range(0, len(rows), batch_size)
    ]


def collate(
    samples: list[Sample], config: Any, pad: int = 0, shift: Callable[[Tensor], Tensor] | None = None
) -> CalibrationBatch:
    ids_BL = padded([sample.ids for sample in samples], pad)
    real_BL = padded([[1] * len(sample.ids) for sample in samples], 0)
    labels_BL = padded([sample.target for sample in samples], NO_LABEL)
    inputs = {"input_ids": ids_BL, "attention_mask": real_BL, "labels": labels_BL}
    if not is_encoder_decoder(config):
        return CalibrationBatch(inputs, {"decoder": real_BL.bool()}, samples[0].domain)
    target_BL = labels_BL != NO_LABEL
    inputs["decoder_input_ids"] = (shift or (lambda labels: shifted(labels, config)))(labels_BL)
    inputs["decoder_attention_mask"] = target_BL.long()
    return CalibrationBatch(inputs, {"encoder": real_BL.bool(), "decoder": target_BL}, samples[0].domain)


def padded(rows: list[list[int]], filler: int) -> Tensor:
    out_BL = torch.full((len(rows), max(map(len, rows))), filler, dtype=torch.long)
    for i, row in enumerate(rows):
        out_BL[i, : len(row)] = torch.tensor(row, dtype=torch.long)
    return out_BL


def shifted(labels_BL: Tensor, config: Any) -> Tensor:
    """Decoder inputs: the labels one place to the right, behind the start token."""
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        raise MoepressError("the model's config has no decoder_start_token_id, so its decoder cannot be started")
    out_BL = torch.cat([torch.full_like(labels_BL[:, :1], start), labels_BL[:, :-1]], dim=1)
    return out_BL.masked_fill(out_BL == NO_LABEL, config.pad_token_id if config.pad_token_id is not None else 0)


def next_token_labels(batch: CalibrationBatch) -> Tensor:
    """Labels in the places of the logits that predict them: (B, L), -100 where nothing is predicted."""
    labels_BL = batch.inputs.get("labels")
    if labels_BL is None:
        if "decoder_input_ids" in batch.inputs:
            raise MoepressError("a batch of an encoder–decoder model needs labels")
        labels_BL = batch.inputs["input_ids"].masked_fill(~batch.keep["decoder"], NO_LABEL)
    if "decoder_input_ids" in batch.inputs:
        return labels_BL
    return torch.nn.functional.pad(labels_BL[:, 1:], (0, 1), value=NO_LABEL)


def is_encoder_decoder(config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False))


def vocabulary_of(config: Any) -> int:
    return int(_text(config).vocab_size)


def pad_id(tokenizer: Any, config: Any) -> int:
    """Any valid id will do: padding is masked everywhere."""
    known = (getattr(tokenizer, "pad_token_id", None), getattr(_text(config), "pad_token_id", None))
    return next((int(i) for i in known if isinstance(i, int) and i >= 0), 0)


def _eos(tokenizer: Any, config: Any) -> int | None:
    own = getattr(tokenizer, "eos_token_id", None)
    configured = getattr(_text(config), "eos_token_id", None)
    return own if own is not None else configured[0] if isinstance(configured, list) else configured


def _check_length(length: int, config: Any, what: str) -> None:
    longest = next((n for name in LONGEST if isinstance(n := getattr(_text(config), name, None), int)), None)
    if longest is not None and length > longest and not is_encoder_decoder(config):
        raise MoepressError(f"{what} {length} is more than the {longest} positions that the model has")


def _text(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config
