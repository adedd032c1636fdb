"""A `Plan` says for every expert of every layer where it goes. It is a readable JSON file that can be edited."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moepress.errors import MoepressError

RouterAction = Literal["redirect", "keep", "mean"]


class Group(BaseModel):
    """Experts that become one. The leader is the reference of the alignment; weights are those of the average."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    leader: int
    members: tuple[int, ...] = Field(min_length=1)
    weights: tuple[float, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Group:
        if self.leader not in self.members:
            raise ValueError(f"leader {self.leader} is not a member of its group")
        if len(self.weights) != len(self.members):
            raise ValueError(f"group {self.leader} has {len(self.members)} members and {len(self.weights)} weights")
        if min(self.weights) < 0 or not abs(sum(self.weights) - 1) < 1e-6:
            raise ValueError(f"the weights of group {self.leader} must be non-negative and add up to 1")
        return self


class LayerPlan(BaseModel):
    """One layer: its groups in the order of the physical experts, and the experts that are dropped."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    experts: int = Field(gt=0)
    router: RouterAction
    groups: tuple[Group, ...] = Field(min_length=1)
    dropped: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _each_expert_once(self) -> LayerPlan:
        seen = sorted([expert for group in self.groups for expert in group.members] + list(self.dropped))
        if seen != list(range(self.experts)):
            raise ValueError(f"layer {self.name!r}: each of the {self.experts} experts must be in one group or dropped")
        if self.dropped and self.router == "redirect":
            raise ValueError(f"layer {self.name!r}: a dropped expert needs a router row less; redirect keeps all rows")
        return self

    @property
    def physical(self) -> int:
        return len(self.groups)

    @property
    def untouched(self) -> bool:
        return self.physical == self.experts

    def expert_map(self) -> list[int]:
        """Original expert -> physical expert; only for layers that drop none."""
        where = {expert: p for p, group in enumerate(self.groups) for expert in group.members}
        return [where[expert] for expert in range(self.experts)]

    @classmethod
    def keep_all(cls, name: str, experts: int) -> LayerPlan:
        groups = tuple(Group(leader=e, members=(e,), weights=(1.0,)) for e in range(experts))
        return cls(name=name, experts=experts, router="redirect", groups=groups)


class Plan(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    format_version: Literal[1] = 1
    layers: tuple[LayerPlan, ...]

    def of(self, name: str) -> LayerPlan:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise MoepressError(f"the plan says nothing about layer {name!r}")

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(_compact_lists(self.model_dump_json(indent=1)) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        try:
            return cls.model_validate_json(Path(path).read_text())
        except FileNotFoundError:
            raise MoepressError(f"there is no plan at {path}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise MoepressError(f"the plan {path} cannot be read: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise MoepressError(f"the plan {path} is not valid: {where}: {first['msg']}") from None


def _compact_lists(text: str) -> str:
    """Lists of numbers on one line, so that people can read and edit the file."""
    import re

    return re.sub(r"\[[\s\d.,eE+-]+\]", lambda m: json.dumps(json.loads(m.group())), text)
