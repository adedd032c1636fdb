"""A compression on disk that several processes work on: the first keeps the journal, and tells the others.

They see the same folder (a shared file system). Layers that all have worked on are written by the first process and
read by the others, which so have the same bits whatever machine they are on; layers that one process has worked on
alone it writes itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepress.checkpoint.job import Job
from moepress.journal import Finished, Observed
from moepress.models.layer import MoELayer
from moepress.team import Team, machine

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SharedJob(Job):
    def __init__(self, folder: Path, model: PreTrainedModel, vanilla: bool, shard_bytes: int, team: Team) -> None:
        super().__init__(folder, model, vanilla, shard_bytes)
        self.team = team
        team.check_same(machine())

    def same(self, what: str, asked: dict[str, Any]) -> None:
        self.team.check_same(asked)
        if self.team.leads:
            super().same(what, asked)

    def observed(self, layer: MoELayer) -> Observed | None:
        return self.team.first(super().observed(layer) if self.team.leads else None)

    def note(self, layer: MoELayer, found: Observed) -> None:
        if self.team.leads:
            super().note(layer, found)

    def finished(self, layer: MoELayer) -> Finished | None:
        done = super().finished(layer) if self.team.leads else None
        done, entry = self.team.first((done, self.entries.get(layer.name)))
        if done is not None and entry is not None and not self.team.leads:
            self.take(layer, entry)
        return done

    def finish(self, layer: MoELayer, done: Finished) -> None:
        if self.team.leads:
            super().finish(layer, done)
        entry = self.team.first(self.entries.get(layer.name))
        if not self.team.leads:
            assert entry is not None
            self.take(layer, entry)
            if done.spec is not None:
                self.fill(layer)

    def finish_alone(self, layer: MoELayer, done: Finished) -> None:
        super().finish(layer, done)

    def together(self, layers: list[MoELayer], done: dict[str, Finished]) -> dict[str, Finished]:
        entries = {name: self.entries[name] for name in done}
        for finished, written in self.team.gather((done, entries)):
            for layer in layers:
                if layer.name in written and layer.name not in self.entries:
                    self.take(layer, written[layer.name])
            done = done | finished
        return done


def job_of(team: Team, folder: Path | None, model: PreTrainedModel, vanilla: bool, shard_bytes: int) -> Job:
    """`folder` is known to the first process."""
    folder = team.first(folder)
    assert folder is not None
    if team.size == 1:
        return Job(folder, model, vanilla, shard_bytes)
    return SharedJob(folder, model, vanilla, shard_bytes, team)
