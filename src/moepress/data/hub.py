"""Records of datasets on the Hugging Face Hub, streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moepress.data.records import Record
from moepress.data.spec import HubDataset
from moepress.errors import MoepressError

SHUFFLE_BUFFER = 1000


def stream_hub(source: HubDataset, seed: int | None) -> Iterator[tuple[str, Record]]:
    """(where, record) of one split. With a seed the stream is shuffled as far as its buffer reaches."""
    rows = open_hub(source.dataset, source.config, source.split)
    if seed is not None:
        rows = rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
    try:
        for number, row in enumerate(rows, 1):
            yield f"hub:{source.dataset} ({source.split}), row {number}", dict(row)
    except OSError as error:
        raise MoepressError(f"the Hub broke off while {source.dataset!r} was read: {error}") from None


def open_hub(dataset: str, config: str | None, split: str) -> Any:
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetNotFoundError
    except ImportError:
        raise MoepressError(
            f"reading hub:{dataset} needs the datasets package: pip install datasets, or give a local file"
        ) from None
    try:
        return load_dataset(dataset, config, split=split, streaming=True)
    except DatasetNotFoundError:
        raise MoepressError(f"the Hub has no dataset {dataset!r}, or it is private") from None
    except (ConnectionError, OSError):
        raise MoepressError(
            f"the Hub cannot be reached for dataset {dataset!r}; without a network give a local .jsonl file instead"
        ) from None
    except ValueError as error:  # unknown configs and splits: the message lists those that exist
        raise MoepressError(f"hub:{dataset}: {' '.join(str(error).split())}") from None
