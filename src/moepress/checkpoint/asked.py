"""All that decides what comes out of a run, so that an interrupted one goes on as it was begun."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from moepress import __version__
from moepress.checkpoint.job import fingerprint
from moepress.checkpoint.paging import PagedWeights
from moepress.models.weights import Weights
from moepress.observe import Statistics
from moepress.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def what_decides(
    recipe: str, model: PreTrainedModel, statistics: Statistics | None, plan: Plan | None, shards: int | str
) -> dict[str, Any]:
    weights = Weights.of(model)
    assert isinstance(weights, PagedWeights)
    return {
        "recipe": recipe,
        "model": fingerprint(weights.files),
        "statistics": None if statistics is None else statistics.fingerprint(),
        "plan": None if plan is None else plan.model_dump(mode="json"),
        "max_shard_size": shards,
        "device": weights.device.type,
        "versions": {name: version(name) for name in ("torch", "transformers")} | {"moepress": __version__},
    }
