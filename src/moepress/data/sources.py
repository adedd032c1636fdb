"""Documents from anywhere: files, the Hub, labelled tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from moepress.data.chat import render, turns_of
from moepress.data.examples import task_examples
from moepress.data.hub import stream_hub
from moepress.data.records import Record, missing_field, read_records
from moepress.data.spec import Source, parse_hub, parse_sources
from moepress.errors import MoepressError

TEXT_FIELDS = ("text", "messages", "conversations")


@dataclass(frozen=True)
class Document:
    """A text; or, with an answer, the prompt of a labelled example."""

    text: str
    domain: str
    answer: str | None = None
    separator: str = " "
    """What stands between prompt and answer where a model reads both as one text."""
    templated: bool = False
    """Rendered by a chat template, which brings its own special tokens."""


def read_documents(
    spec: str,
    *,
    tokenizer: Any = None,
    text_field: str | None = None,
    chat_template: bool | None = None,
    split: str = "train",
    seed: int = 0,
) -> Iterator[Document]:
    """The documents of all sources of a spec, one source after the other, in their order.

    `text_field`: the field that holds the text or the list of messages; by default `text`, `messages` or
    `conversations`. `chat_template`: None renders messages, False joins them as plain text, True puts the examples of
    a task into the template too. `split`: which records to take where records or tasks have splits; a Hub source
    names its own. `seed` shuffles a Hub stream.
    """
    sources = parse_sources(spec)
    for source in sources:
        for document in source_documents(source, tokenizer, text_field, chat_template, split, seed):
            yield document if len(sources) == 1 else replace(document, domain=source.name)


def source_documents(
    source: Source, tokenizer: Any, text_field: str | None, chat_template: bool | None, split: str, seed: int
) -> Iterator[Document]:
    if source.kind == "windows":
        raise MoepressError(f"{source.location} holds token ids, not text")
    if source.kind == "task":
        yield from _task_documents(source, tokenizer, chat_template, split)
        return
    if source.kind == "hub":
        dataset = parse_hub(source.location)
        records = stream_hub(dataset, seed)
        text_field = dataset.field or text_field
    else:
        records = _of_split(read_records(source.location), source.location, split)
    for where, record in records:
        yield _document(where, record, source.name, tokenizer, text_field, chat_template)


def _of_split(records: Iterator[tuple[str, Record]], location: str, split: str) -> Iterator[tuple[str, Record]]:
    """Only the records of one split; records that do not say theirs belong to every split."""
    seen: set[str] = set()
    for where, record in records:
        own = record.get("split")
        if own is None or own == split:
            seen.add(split)
            yield where, record
        else:
            seen.add(str(own))
    if split not in seen:
        raise MoepressError(f"{location} has no records of split {split!r}; it has {', '.join(sorted(seen))}")


def _document(
    where: str, record: Record, domain: str, tokenizer: Any, text_field: str | None, chat_template: bool | None
) -> Document:
    field = text_field or next((name for name in TEXT_FIELDS if name in record), TEXT_FIELDS[0])
    if field not in record:
        raise missing_field(where, field, record)
    value = record[field]
    domain = str(record.get("domain", domain))
    if isinstance(value, str):
        if chat_template:
            raise MoepressError(f"{where}: field {field!r} is plain text; chat_template=true needs messages")
        return Document(value, domain)
    turns = turns_of(value, f"{where}, field {field!r}")
    text = render(turns, tokenizer, chat_template, where)
    return Document(text, domain, templated=chat_template is not False)


def _task_documents(source: Source, tokenizer: Any, chat_template: bool | None, split: str) -> Iterator[Document]:
    name, _, folder = source.location.partition("@")
    task, examples = task_examples(name, split, folder or None)
    for example in examples:
        if chat_template:
            turns = [{"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.answer}]
            text = render(turns, tokenizer, True, f"task {name}")
            prompt = render(turns[:1], tokenizer, True, f"task {name}", continue_as_assistant=True)
            if not text.startswith(prompt):
                raise MoepressError(
                    "the chat template rewrites earlier turns, so a task's answer has no clear beginning"
                )
            yield Document(prompt, source.name, text[len(prompt) :], separator="", templated=True)
        else:
            yield Document(example.prompt, source.name, example.answer, task.separator)
