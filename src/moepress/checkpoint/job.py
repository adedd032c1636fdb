"""A compression on disk: finished layers as they will be shipped, and a journal by which an interrupted run goes on.

A layer is finished when its entry in the journal is there, which is written after its weights, whole or not at all.
What has not been finished is done again. The output is put together from the finished layers and, byte for byte, from
those tensors of the original that nothing has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moepress.checkpoint.compact import attach
from moepress.checkpoint.files import TensorFiles
from moepress.checkpoint.folder import INDEX, SINGLE, read_json
from moepress.checkpoint.guard import NOTICE, compact_conversions
from moepress.checkpoint.headers import read_headers
from moepress.checkpoint.keeping import Keeper
from moepress.checkpoint.load import quiet
from moepress.checkpoint.manifest import checksum
from moepress.checkpoint.mapping import Part
from moepress.checkpoint.paging import PagedWeights
from moepress.checkpoint.quantizer import FORMAT_VERSION
from moepress.checkpoint.shards import Item, divided, write_file
from moepress.checkpoint.vanilla import plain_skeleton
from moepress.errors import MoepressError
from moepress.journal import Finished, Journal, Observed
from moepress.models.layer import CompactSpec, MoELayer
from moepress.observe import Statistics
from moepress.plan import LayerPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ONE_FILE = 10**9
"""An output of at most so many bytes is one file; a larger one keeps its layers in files of their own, since putting
them together would write everything twice."""
EXPERTS = ".experts."


class Job(Journal):
    def __init__(self, folder: Path, model: PreTrainedModel, vanilla: bool, shard_bytes: int) -> None:
        weights = model.__dict__["_moepress_weights"]
        assert isinstance(weights, PagedWeights)
        self.folder, self.model, self.weights = folder, model, weights
        self.vanilla, self.shard_bytes = vanilla, shard_bytes
        self.parts, self.journal = folder / "parts", folder / "journal"
        self.notes: list[str] = []
        self.entries: dict[str, dict[str, Any]] = {}
        """Of finished layers, by name."""
        self._replaced: set[str] = set()
        self._rounded = 0
        self._files: dict[str, dict[str, Any]] = {}
        """Entries of the parts for the manifest, by name."""
        for place in (self.parts, self.journal):
            place.mkdir(exist_ok=True)

    def same(self, what: str, asked: dict[str, Any]) -> None:
        """An interrupted run goes on only as it was begun."""
        place = self.journal / f"{what}.json"
        asked = json.loads(json.dumps(asked))
        if not place.exists():
            write_json(place, asked)
            return
        begun = read_json(place)
        if changed := sorted(key for key in {*asked, *begun} if asked.get(key) != begun.get(key)):
            raise MoepressError(
                f"the interrupted run had another {changed[0].replace('_', ' ')}: repeat it as it was begun, or start "
                "anew with --overwrite (overwrite=True) instead of --resume"
            )

    # ---- observations -------------------------------------------------------------------------------------------

    def observed(self, layer: MoELayer) -> Observed | None:
        place = self.journal / f"observed-{layer.index:05d}.json"
        if not place.exists():
            return None
        score = read_json(place)["score"]
        found = Statistics.load(sums_of(place))
        return Observed(found.layers[layer.name], None if score is None else torch.tensor(score, dtype=torch.float64))

    def note(self, layer: MoELayer, found: Observed) -> None:
        place = self.journal / f"observed-{layer.index:05d}.json"
        self._keep(sums_of(place), layer, found.statistics)
        score = None if found.score_E is None else found.score_E.double().tolist()
        write_json(place, {"layer": layer.name, "score": score})

    def _keep(self, place: Path, layer: MoELayer, statistics: dict[str, Any]) -> None:
        Statistics({layer.name: statistics}).save(place)
        for suffix in (".safetensors", ".json"):
            flush(place.with_suffix(suffix))

    # ---- finished layers ----------------------------------------------------------------------------------------

    def finished(self, layer: MoELayer) -> Finished | None:
        place = self.journal / f"finished-{layer.index:05d}.json"
        if not place.exists():
            return None
        entry = read_json(place)
        for file in entry["files"]:
            path = self.parts / file["file"]
            if not path.is_file() or path.stat().st_size != file["size"] or checksum(path) != file["sha256"]:
                raise MoepressError(f"{path} of the interrupted run is damaged: start anew with --overwrite")
        self.take(layer, entry)
        statistics = {}
        if entry["statistics"]:
            statistics = Statistics.load(sums_of(place)).layers[layer.name]
        near = near_of(place)
        return Finished(
            LayerPlan.model_validate(entry["plan"]),
            None if entry["spec"] is None else CompactSpec(**entry["spec"]),
            statistics,
            gap=entry["gap"],
            picked=entry["picked"],
            solved=Counter(entry["solved"]),
            similarity_EE=load_file(near)["similarity"] if near.exists() else None,
            output_error=entry["output_error"],
        )

    def finish(self, layer: MoELayer, done: Finished) -> None:
        place = self.journal / f"finished-{layer.index:05d}.json"
        items: list[Item] = []
        replaced: list[str] = []
        rounded = 0
        if done.spec is not None:
            state, replaced = self._changed(layer)
            items, rounded = self._as_in_files(layer, done.plan, done.spec, state)
        files = [
            write_file(self.parts / f"{layer.index:05d}-{number:03d}.safetensors", group)
            for number, group in enumerate(divided(items, self.shard_bytes))
        ]
        if rounded:  # what was stored in fewer bits is what the batches go on through, and what a later run would read
            self._read_back(files)
        if done.statistics:
            self._keep(sums_of(place), layer, done.statistics)
        near_of(place).unlink(missing_ok=True)
        if done.similarity_EE is not None:
            save_file({"similarity": done.similarity_EE.contiguous()}, near_of(place))
            flush(near_of(place))
        entry = {
            "layer": layer.name,
            "plan": done.plan.model_dump(mode="json"),
            "spec": None if done.spec is None else asdict(done.spec),
            "gap": done.gap,
            "picked": done.picked,
            "solved": dict(done.solved),
            "output_error": done.output_error,
            "statistics": bool(done.statistics),
            "files": files,
            "replaced": sorted(replaced),
            "rounded": rounded,
        }
        write_json(place, entry)
        self.take(layer, entry)

    def take(self, layer: MoELayer, entry: dict[str, Any]) -> None:
        """A layer is finished, and this is its entry in the journal."""
        self.entries[layer.name] = entry
        self._replaced.update(entry["replaced"])
        self._files |= {file["file"]: file for file in entry["files"]}
        self._rounded += entry.get("rounded", 0)
        if entry["spec"] is not None:
            self.weights.finished.add(layer.name)

    def _changed(self, layer: MoELayer) -> tuple[dict[str, Tensor], list[str]]:
        """The block's tensors that differ from the original's, and the names in the files of what they replace."""
        now = {f"{layer.name}.{name}": tensor for name, tensor in layer.block.state_dict().items()}
        state: dict[str, Tensor] = {name: t for name, t in now.items() if not self.weights.known(name)}
        replaced: list[str] = []
        for part in dict.fromkeys(self.weights.part(name) for name in self.weights.targets(layer.name)):
            if not self._differs(part, now):
                continue
            replaced += part.names()
            outside = [name for name in part.targets if not name.startswith(f"{layer.name}.")]
            state |= {name: now[name] for name in part.targets if name in now}
            if outside:  # one tensor of the files is shared with another module
                original = self.weights.original(part)
                state |= {name: original[name] for name in outside}
        return state, replaced

    def _differs(self, part: Part, now: dict[str, Tensor]) -> bool:
        if any(name in now and now[name].shape != self.weights.stored(name).shape for name in part.targets):
            return True
        if any(EXPERTS in name for name in part.targets):
            return True
        original = self.weights.original(part)
        return any(name in now and not torch.equal(now[name].to(t.dtype), t) for name, t in original.items())

    def _as_in_files(
        self, layer: MoELayer, plan: LayerPlan, spec: CompactSpec, state: dict[str, Tensor]
    ) -> tuple[list[Item], int]:
        """The same tensors under the names and in the shapes that the output's files have, and how many of them lose
        precision there."""
        from transformers.core_model_loading import revert_weight_conversion

        stored = {name: self.weights.stored_dtype(name, tensor) for name, tensor in state.items()}
        empty = {name: torch.empty(t.shape, dtype=stored[name], device="meta") for name, t in state.items()}
        with self._saving(layer, spec) as model:
            made = revert_weight_conversion(model, dict(state))
            types = {name: tensor.dtype for name, tensor in revert_weight_conversion(model, empty).items()}
        keeper = Keeper(self.weights.files, plan)
        items = [item for name, tensor in made.items() for item in keeper.items(name, tensor, types[name])]
        return items, keeper.rounded

    @contextmanager
    def _saving(self, layer: MoELayer, spec: CompactSpec) -> Iterator[Any]:
        """The model as `save_pretrained` should see it."""
        if self.vanilla:
            yield plain_skeleton(self.model, {layer.name: spec}, spec.experts, spec.physical)
            return
        before = self.model._weight_conversions
        try:
            self.model._weight_conversions = compact_conversions(self.model, [layer.name])  # type: ignore[assignment]
            yield self.model
        finally:
            self.model._weight_conversions = before

    def restore(self, layer: MoELayer, done: Finished) -> None:
        assert done.spec is not None
        layer.adapter.reshape(layer.block, done.spec)
        self.fill(layer)

    def fill(self, layer: MoELayer) -> None:
        """Give a layer that has its final shape the weights with which it was finished."""
        self._read_back(self.entries[layer.name]["files"])

    def _read_back(self, entries: list[dict[str, Any]]) -> None:
        files = self.weights.files.beside(read_headers(self.parts / file["file"] for file in entries))
        with quiet():
            self.weights.replace(files)
        files.close()

    # ---- the output ---------------------------------------------------------------------------------------------

    def assemble(self, specs: dict[str, CompactSpec]) -> tuple[Path, dict[str, dict[str, Any]]]:
        """The whole checkpoint but for the files beside the weights; its folder, and the manifest's entries."""
        from transformers.core_model_loading import revert_weight_conversion

        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)  # of a run that was interrupted here
        out.mkdir()
        kept = self._kept()
        if self.vanilla:
            counts = {(spec.experts, spec.physical) for spec in specs.values()} or {(1, 1)}
            (old, new), *_ = counts
            kept = self._without_heads(kept, changed=old != new)
            model = plain_skeleton(self.model, specs, old, new)
            changed: dict[str, Tensor] = {}
        else:
            model = attach(self.model, specs)
            guard = model.config.quantization_config.guard
            notice = f"{min(specs)}.{NOTICE}"
            changed = revert_weight_conversion(
                model, {guard: model.get_parameter_or_buffer(guard), notice: torch.tensor(FORMAT_VERSION)}
            )
        model.save_pretrained(os.fspath(out), state_dict={})
        (out / SINGLE).unlink(missing_ok=True)
        source = self.weights.files
        self.notes += source.describe(out / "config.json", self._rounded)
        items = [Item.stored(source.raw, stored) for name in kept for stored in source.stored(name).values()]
        items = [item.shaped(tuple(changed[item.name].shape)) if item.name in changed else item for item in items]
        finished = TensorFiles(read_headers(self.parts / name for name in sorted(self._files)))
        here = {*kept, *finished.header}
        items += [Item.of(name, t, t.dtype) for name, t in changed.items() if name not in here and not t.is_meta]
        total = sum(item.size for item in items) + sum(finished.size(name) for name in finished.header)
        parts = [Item.stored(finished, name) for name in finished.header]
        parts = [item.shaped(tuple(changed[item.name].shape)) if item.name in changed else item for item in parts]
        if total <= min(ONE_FILE, self.shard_bytes):
            entry = write_file(out / SINGLE, [*items, *parts])
            return out, {SINGLE: entry}
        return out, self._sharded(out, items, parts, finished, changed, total)

    def _sharded(
        self,
        out: Path,
        items: list[Item],
        parts: list[Item],
        finished: TensorFiles,
        changed: dict[str, Tensor],
        total: int,
    ) -> dict[str, dict[str, Any]]:
        groups = list(divided(items, self.shard_bytes))
        by_file: dict[str, list[Item]] = {name: [] for name in sorted(self._files)}
        for item in parts:
            by_file[Path(finished.header[item.name]["file"]).name].append(item)
        count = len(groups) + len(by_file)
        entries: dict[str, dict[str, Any]] = {}
        places: dict[str, str] = {}
        for number, group in enumerate([*groups, *by_file.values()], 1):
            name = f"model-{number:05d}-of-{count:05d}.safetensors"
            part = list(by_file)[number - 1 - len(groups)] if number > len(groups) else None
            if part is None or any(item.name in changed for item in group):
                entries[name] = write_file(out / name, group)
            else:
                link(self.parts / part, out / name)
                entries[name] = self._files[part]
            places |= {item.name: name for item in group}
        parameters = sum(p.numel() for p in self.model.parameters())
        index = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": places}
        (out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return entries

    def _kept(self) -> list[str]:
        """Names in the files of what nothing has changed, in the order in which it lies there."""
        header = self.weights.files.header
        names = (name for name in header if name not in self._replaced)
        return sorted(names, key=lambda name: (header[name]["file"], header[name]["start"]))

    def _without_heads(self, kept: list[str], changed: bool) -> list[str]:
        """A vanilla config has one number of experts for everything: a head for multi-token prediction that
        transformers does not run, and whose experts nobody has seen, is left out."""
        used = {name for part in self.weights.parts for name in part.names()}
        heads = {".".join(n.split(".")[:3]) for n in kept if n not in used and EXPERTS in n} if changed else set()
        if not heads:
            return kept
        self.notes.append(
            f"left out, since its experts are not compressed: {', '.join(sorted(heads))} (multi-token prediction)"
        )
        for config in (self.model.config, getattr(self.model.config, "text_config", None)):
            if getattr(config, "num_nextn_predict_layers", None):
                config.num_nextn_predict_layers = 0  # type: ignore[union-attr]
        return [name for name in kept if not name.startswith(tuple(f"{head}." for head in heads))]


def write_json(place: Path, content: Any) -> None:
    """As a whole or not at all, and on the disk."""
    partial = place.with_name(f"{place.name}.partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    flush(partial)
    os.replace(partial, place)
    flush(place.parent)


def flush(place: Path) -> None:
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # not every file system has links
        shutil.copyfile(source, target)


def fingerprint(files: TensorFiles) -> str:
    """Of a checkpoint, without reading its weights."""
    found = hashlib.sha256()
    for name in sorted({entry["file"] for entry in files.header.values()}):
        state = os.stat(name)
        found.update(f"{Path(name).name} {state.st_size} {state.st_mtime_ns}\n".encode())
    for name, entry in sorted(files.raw.header.items()):
        found.update(f"{name} {entry['dtype']} {entry['shape']} {entry['start']}\n".encode())
    return found.hexdigest()


def sums_of(place: Path) -> Path:
    """Where the statistics go that belong to an entry of the journal."""
    return place.with_name(f"sums_{place.stem.replace('-', '_')}")


def near_of(place: Path) -> Path:
    """The same for how alike the layer's experts were."""
    return place.with_name(f"near_{place.stem.replace('-', '_')}.safetensors")
