"""The statistics of a model: gathered by one pass, saved as one safetensors file with a json header beside it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moepress.errors import MoepressError
from moepress.models.layer import MoELayer
from moepress.models.visit import CalibrationBatch, LayerVisit
from moepress.observe.gradients import GradientStatistic, from_gradients, gather_gradients
from moepress.observe.statistic import STATISTICS, LayerShape, Statistic

FORMAT_VERSION = 2


class Statistics:
    """Sums by layer name and statistic name."""

    def __init__(self, layers: dict[str, dict[str, Statistic]] | None = None) -> None:
        self.layers = layers or {}

    def gather(self, visit: LayerVisit, names: Iterable[str]) -> dict[str, Statistic]:
        """Run one layer's batches through the named statistics, those from gradients left out."""
        layer = visit.layer
        shape = LayerShape.of(layer)
        gathered = {name: STATISTICS.create(name, shape=shape) for name in names if not from_gradients([name])}
        # Some families have to copy their experts together for it.
        bank: Any = layer.bank if any(statistic.runs_experts for statistic in gathered.values()) else None

        def partial(i: int) -> dict[str, dict[str, Tensor]]:
            batch = visit.observe(i)[0]
            made = {name: STATISTICS.create(name, shape=shape) for name in gathered}
            for statistic in made.values():
                enough = statistic.sampled and -(-statistic.sampled // len(visit))
                statistic.update(batch.thinned(enough) if enough else batch, bank)
            return {name: statistic.sums for name, statistic in made.items()}

        for sums in visit.each(partial):
            for name, statistic in gathered.items():
                for key, value in sums[name].items():
                    statistic.sums[key] += value
        self._take(layer, gathered)
        return gathered

    def gather_gradients(
        self,
        model: torch.nn.Module,
        layers: list[MoELayer],
        batches: list[CalibrationBatch],
        names: Iterable[str],
    ) -> None:
        """One pass with gradients for those of the named statistics that need it, of all layers."""
        gathered = {
            layer.name: {name: STATISTICS.create(name, shape=LayerShape.of(layer)) for name in from_gradients(names)}
            for layer in layers
        }
        sums = {
            layer: [statistic for statistic in made.values() if isinstance(statistic, GradientStatistic)]
            for layer, made in gathered.items()
        }
        gather_gradients(model, layers, batches, sums)
        for layer in layers:
            for statistic in sums[layer.name]:
                statistic.finish()
            self._take(layer, gathered[layer.name])

    def _take(self, layer: MoELayer, gathered: Mapping[str, Statistic]) -> None:
        for name, statistic in gathered.items():
            for key, value in statistic.sums.items():
                if not torch.isfinite(value).all():
                    raise MoepressError(f"layer {layer.name!r}: {name}.{key} is not finite; check the model's weights")
        self.layers.setdefault(layer.name, {}).update(gathered)

    def of(self, layer: MoELayer | str, name: str) -> dict[str, Tensor]:
        """The sums of one statistic of one layer."""
        layer_name = layer if isinstance(layer, str) else layer.name
        try:
            return self.layers[layer_name][name].sums
        except KeyError:
            raise MoepressError(f"the statistics hold no {name!r} for layer {layer_name!r}") from None

    def merge(self, other: Statistics) -> Statistics:
        """The statistics of both calibration runs together."""
        if self._header() != other._header():
            raise MoepressError("statistics of different models, or of different kinds, cannot be merged")
        if single := from_gradients({name for gathered in self.layers.values() for name in gathered}):
            raise MoepressError(f"{single[0]} is of one run over all text: statistics with it cannot be merged")
        merged = Statistics.from_header(self._header())
        for layer, name, key, total in merged._each():
            total.copy_(self.of(layer, name)[key] + other.of(layer, name)[key])
        return merged

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `path`.safetensors and `path`.json."""
        path = Path(path)
        tensors = {f"{layer}|{name}|{key}": value for layer, name, key, value in self._each()}
        save_file(tensors, path.with_suffix(".safetensors"))
        path.with_suffix(".json").write_text(json.dumps(self._header(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        path = Path(path)
        try:
            header = json.loads(path.with_suffix(".json").read_text())
            tensors = load_file(path.with_suffix(".safetensors"))
            check_shapes(header, tensors)
            statistics = cls.from_header(header)
            for layer, name, key, total in statistics._each():
                total.copy_(tensors[f"{layer}|{name}|{key}"])
        except MoepressError:
            raise
        except FileNotFoundError as error:
            raise MoepressError(f"no statistics at {path}: {error.filename} is missing") from None
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise MoepressError(f"{path} does not hold statistics that this version can read: {reason}") from None
        except Exception as error:  # safetensors raises a bare Exception type of its own on a truncated file
            reason = str(error).partition("\n")[0]
            raise MoepressError(f"{path.with_suffix('.safetensors')} is damaged: {reason}") from None
        return statistics

    @classmethod
    def from_header(cls, header: dict) -> Statistics:
        if header.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"format_version is {header.get('format_version')!r}, not {FORMAT_VERSION}")
        return cls(
            {
                layer: {
                    name: STATISTICS.create(name, shape=LayerShape(**entry["shape"])) for name in entry["statistics"]
                }
                for layer, entry in header["layers"].items()
            }
        )

    def fingerprint(self) -> str:
        found = hashlib.sha256(json.dumps(self._header()).encode())
        for *_, value in self._each():
            found.update(value.numpy().tobytes())
        return found.hexdigest()

    def _header(self) -> dict:
        return {
            "format_version": FORMAT_VERSION,
            "layers": {
                layer: {
                    "shape": vars(next(iter(gathered.values())).shape),
                    "statistics": list(gathered),
                }
                for layer, gathered in self.layers.items()
                if gathered
            },
        }

    def _each(self) -> Iterable[tuple[str, str, str, Tensor]]:
        for layer, gathered in self.layers.items():
            for name, statistic in gathered.items():
                for key, value in statistic.sums.items():
                    yield layer, name, key, value


def check_shapes(header: dict, tensors: dict[str, Tensor]) -> None:
    """A header that asks for other sums than the file holds is refused before any memory is given to it."""
    for layer, entry in header["layers"].items():
        shape = LayerShape(**entry["shape"])
        if any(type(value) is not int or value < 0 for value in vars(shape).values()):
            raise ValueError(f"the shape of layer {layer!r} is not made of counts")
        for name in entry["statistics"]:
            if not isinstance(name, str):
                raise ValueError(f"layer {layer!r} names a statistic {name!r}")
            for key, size in STATISTICS.get(name).sizes(shape).items():
                if tuple(tensors[f"{layer}|{name}|{key}"].shape) != tuple(size):
                    raise ValueError(f"{name}.{key} of layer {layer!r} is not of the shape that the header says")
