"""From documents to tokenised samples: whole documents, packed windows, prompts with answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

from moepress.data.sources import Document

TYPICAL_DOCUMENT = 8
"""Tokens that a document has at the very least, on average; how many are held while packing windows rests on it."""


@dataclass(frozen=True)
class Sample:
    """One row of a batch. `target` are the labels: aligned with `ids` in a decoder-only model (-100 where the model
    is not asked), the decoder's own tokens in an encoder–decoder model."""

    ids: list[int]
    target: list[int]
    domain: str = ""


@dataclass
class Encoder:
    """Turns documents into samples for one tokenizer and one kind of model, and counts what it was shown."""

    tokenizer: Any
    eos: int | None
    length: int
    encoder_decoder: bool
    documents: int = 0
    tokens_seen: int = 0

    def tokens(self, text: str, special: bool = True) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def ended(self, ids: list[int], limit: int) -> list[int]:
        """At most `limit` tokens, the last of them eos, whether or not the tokenizer has put it there."""
        if self.eos is None:
            return ids[:limit]
        return [*self.open_ended(ids)[: limit - 1], self.eos]

    def document(self, document: Document) -> list[int]:
        """All tokens of a plain document, without an eos of the tokenizer's making."""
        ids = self.tokens(document.text, special=not document.templated)
        self.documents += 1
        self.tokens_seen += len(ids)
        return ids if document.templated else self.open_ended(ids)

    def open_ended(self, ids: list[int]) -> list[int]:
        return ids[:-1] if ids and ids[-1] == self.eos else ids

    def window(self, ids: list[int], domain: str, ends: bool) -> Sample:
        """A piece of text; an encoder reads its first half and the decoder continues it.

        `ends`: the text is over here, so that a decoder is right to say eos.
        """
        if not self.encoder_decoder:
            return Sample(ids, ids, domain)
        half = len(ids) // 2
        prefix, continuation = self.ended(ids[:half], half + 1), ids[half:]
        return Sample(prefix, self.ended(continuation, len(continuation) + 1) if ends else continuation, domain)

    def example(self, document: Document, end: bool = True) -> Sample:
        """A prompt with its answer; what is too long is cut off the prompt. `end`: eos follows the answer where
        prompt and answer are one text."""
        assert document.answer is not None
        special = not document.templated
        if self.encoder_decoder:
            prompt = self.ended(self.tokens(document.text, special), self.length)
            return Sample(prompt, self.ended(self.tokens(document.answer, special), self.length), document.domain)
        ids, answer = self.continuation(document.text, document.separator + document.answer, special)
        if self.eos is not None and special and end:
            answer = [*answer, self.eos]
        answer = answer[: self.length - 1]
        ids = ids[max(0, len(ids) + len(answer) - self.length) :]
        return Sample([*ids, *answer], [-100] * len(ids) + answer, document.domain)

    def continuation(self, prompt: str, answer: str, special: bool) -> tuple[list[int], list[int]]:
        """The tokens of a prompt and of what follows it, tokenised as one text; no eos at the end of either."""
        ids, whole = (self.tokens(text, special) for text in (prompt, prompt + answer))
        if special:
            ids, whole = self.open_ended(ids), self.open_ended(whole)
        return ids, whole[len(ids) :]


def choose(documents: Iterable[Document], limit: int, random: Random) -> list[Document]:
    """At most `limit` documents, each equally likely, in random order. Never holds more than `limit`."""
    chosen: list[Document] = []
    for number, document in enumerate(documents):
        if len(chosen) < limit:
            chosen.append(document)
        elif (place := random.randrange(number + 1)) < limit:
            chosen[place] = document
    random.shuffle(chosen)
    return chosen


def example_samples(documents: Iterable[Document], encoder: Encoder, wanted: int | None) -> Iterator[Sample]:
    return (encoder.example(document) for document in islice(documents, wanted))


def document_samples(documents: Iterable[Document], encoder: Encoder, wanted: int | None) -> Iterator[Sample]:
    """The beginning of each document; if there are too few documents, their further full windows."""
    length = encoder.length
    rests: list[tuple[list[int], str]] = []
    given = 0
    for document in documents:
        if given == wanted:
            return
        ids = encoder.document(document)
        if len(ids) < 2:  # nothing to predict
            continue
        yield encoder.window(ids[:length], document.domain, ends=len(ids) <= length)
        given += 1
        if wanted is not None and len(ids) >= 2 * length:
            rests.append((ids[length:], document.domain))
    while rests and given != wanted:
        (ids, domain), *rests = rests
        yield encoder.window(ids[:length], domain, ends=False)
        given += 1
        if len(ids) >= 2 * length:
            rests.append((ids[length:], domain))


def packed_samples(documents: Iterable[Document], encoder: Encoder, wanted: int | None) -> Iterator[Sample]:
    """Full windows of documents strung together with eos between them, each domain by itself."""
    length = encoder.length
    waiting: dict[str, list[int]] = {}
    given = 0
    for document in documents:
        ids = encoder.document(document)
        row = waiting.setdefault(document.domain, [])
        row += [*ids, encoder.eos] if encoder.eos is not None and not document.templated else ids
        while len(row) >= length:
            if given == wanted:
                return
            yield encoder.window(row[:length], document.domain, ends=False)
            given += 1
            del row[:length]
