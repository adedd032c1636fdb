"""What stands in `source`: files, Hub datasets, tasks, windows, and mixtures of them."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moepress.errors import MoepressError

Kind = Literal["file", "hub", "task", "windows"]
SPLIT_NAME = re.compile(r"(train|valid|val|test|dev|eval)", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """One place that text comes from, and its share of the samples."""

    kind: Kind
    location: str
    """What follows `hub:` or `task:`, otherwise a path."""
    name: str
    """What its domain is called."""
    weight: float = 1.0


def parse_sources(spec: str) -> list[Source]:
    """`a.jsonl:0.3,b.jsonl:0.7` → sources with weights that sum to 1; without weights all are equal."""
    if not spec.strip():
        raise MoepressError("no text is named: give a .jsonl or .txt file, hub:name:split, task:name or .safetensors")
    parts = [spec.strip()] if os.path.exists(spec) else [part.strip() for part in spec.split(",")]
    if not all(parts):
        raise MoepressError(f"the mixture {spec!r} has an empty part: write a.jsonl:0.3,b.jsonl:0.7")
    split = [_split_weight(part) for part in parts]
    weights = [weight for _, weight in split if weight is not None]
    if weights and len(weights) < len(split):
        bare = next(place for place, weight in split if weight is None)
        raise MoepressError(f"the mixture {spec!r} has no weight for {bare!r}: give all parts a weight, or none")
    total = sum(weights) or float(len(split))
    sources = [_source(place, (1.0 if weight is None else weight) / total) for place, weight in split]
    return _distinct(sources)


def _split_weight(part: str) -> tuple[str, float | None]:
    place, colon, text = part.rpartition(":")
    if not colon or os.path.exists(part):
        return part, None
    try:
        weight = float(text)
    except ValueError:
        return part, None
    if not math.isfinite(weight) or weight <= 0:
        raise MoepressError(f"the weight of {place!r} must be a positive number, not {text}")
    return place, weight


def _source(place: str, weight: float) -> Source:
    head, colon, rest = place.partition(":")
    if colon and head == "hub":
        return Source("hub", rest, rest.partition(":")[0].rpartition("/")[2], weight)
    if colon and head == "task":
        return Source("task", rest, rest.partition("@")[0], weight)
    path = Path(place)
    return Source("windows" if path.suffix == ".safetensors" else "file", place, path.name.partition(".")[0], weight)


def _distinct(sources: list[Source]) -> list[Source]:
    """Two sources of one name are told apart by their whole location."""
    names = [source.name for source in sources]
    distinct = [replace(s, name=s.location) if names.count(s.name) > 1 else s for s in sources]
    if len({source.name for source in distinct}) < len(distinct):
        raise MoepressError("the mixture names the same source twice; give it once, with the sum of the weights")
    return distinct


@dataclass(frozen=True)
class HubDataset:
    dataset: str
    config: str | None
    split: str
    field: str | None


def parse_hub(location: str) -> HubDataset:
    """`org/name[:config]:split[:field]`; the split is the first part that is called like one (train, test, …)."""
    dataset, *parts = location.split(":")
    at = next((i for i, part in enumerate(parts) if SPLIT_NAME.match(part)), None)
    if at is None and len(parts) == 2:
        at = 1
    if not dataset or at is None or at > 1 or len(parts) > at + 2:
        raise MoepressError(f"'hub:{location}': write hub:org/name:split, hub:org/name:config:split or …:split:field")
    return HubDataset(dataset, parts[0] if at else None, parts[at], parts[at + 1] if len(parts) > at + 1 else None)


def shares(sources: list[Source], samples: int) -> list[int]:
    """How many of the samples each source gives: the weights, rounded so that the sum is right."""
    exact = [source.weight * samples for source in sources]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: samples - sum(counts)]:
        counts[i] += 1
    for source, count in zip(sources, counts, strict=True):
        if not count:
            raise MoepressError(
                f"the weight of {source.name!r} gives it none of {samples} samples: raise the weight or samples"
            )
    return counts
