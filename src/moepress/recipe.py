"""A recipe: everything that decides what comes out, typed and checked, YAML in and out.

The places of a recipe are named here; what can stand in them is whatever is registered. A component is written as its
name, or as a mapping with `name` and its parameters.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from moepress.align import ALIGNMENTS, SOLVERS
from moepress.data.batches import CalibrationData
from moepress.decompose.importance import Importance
from moepress.decompose.options import Decomposition
from moepress.errors import MoepressError
from moepress.merge import MERGES
from moepress.methods import METHODS
from moepress.plan import BUDGETS, GROUPINGS, GUARDS, SALIENCIES, SIMILARITIES
from moepress.recovery import router  # noqa: F401 - registration of a router refit
from moepress.refit import REFITS
from moepress.refit.router import ROUTER_REFITS
from moepress.registry import Registry, did_you_mean

Component = str | dict[str, Any]
PLACES: dict[str, Registry[Any]] = {
    "plan.saliency": SALIENCIES,
    "plan.similarity": SIMILARITIES,
    "plan.budget": BUDGETS,
    "plan.grouping": GROUPINGS,
    "plan.guard": GUARDS,
    "align.method": ALIGNMENTS,
    "align.solver": SOLVERS,
    "merge.operator": MERGES,
    "refit.method": REFITS,
    "refit.router": ROUTER_REFITS,
}
SECTIONS = ("plan", "align", "merge", "refit", "decompose")
"""Sections whose entries belong to the method."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class PlanSection(Section):
    saliency: Component = Field(default="frequency", description="how much each expert matters")
    rivals: list[Component] = Field(
        default_factory=list,
        description="other saliencies: each proposes which experts go, and the one that leaves the smallest error wins",
    )
    similarity: Component = Field(default="router-logits", description="which experts are alike")
    budget: Component = Field(default="adaptive", description="how many experts each layer keeps")
    grouping: Component = Field(default="dominant", description="which expert joins which group")
    guard: Component = Field(default="none", description="which experts are left alone, whatever their score")
    skip: Literal["auto", "none"] | list[str] = Field(
        default="auto",
        description="MoE layers left whole: `none`, a list of layer paths, or `auto` (the method's own choice)",
    )


class AlignSection(Section):
    method: Component = Field(default="weight-matching", description="how hidden units are matched before merging")
    reference: Literal["dominant", "first"] = Field(
        default="dominant", description="align each group to its dominant expert, or all experts to the layer's first"
    )
    solver: Component = Field(default="auto", description="who solves the matching")
    memory: str = Field(default="2GB", description="of cost matrices that are held at a time (one at the least)")


class MergeSection(Section):
    operator: Component = Field(default="frequency", description="how aligned experts become one")


class RefitSection(Section):
    method: Component = Field(default="none", description="how what is left takes over the work of what was removed")
    router: Component = Field(default="none", description="what is done about the router: fitted or trained")


class DecomposeSection(Section):
    rank: int | None = Field(default=None, ge=1, description="of UV in W = UV + S; none: matrices stay whole")
    ratio: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="share of S that stays; 1: all of it, to be pruned while the model recovers",
    )
    whiten: bool = Field(default=True, description="the low rank is nearest in what it makes of calibration text")
    refit: bool = Field(default=True, description="solve for UV and S again once it is known which columns S keeps")
    along: Literal["columns", "rows"] = Field(default="columns", description="what is pruned as a whole")
    reduce: Literal["sum", "mean"] = Field(
        default="sum", description="a column's importance is the sum or the mean of its entries'"
    )
    smoothing: float | None = Field(
        default=0.85,
        ge=0,
        lt=1,
        description="of the importance over batches: what stays of it; null: the plain average",
    )


class Recipe(Section):
    method: str = "auto"
    preset: str | None = None
    keep: int | float | None = Field(None, description="experts per layer: a count (8) or a fraction (0.5)")
    target_size: str | None = Field(None, description="instead of keep: size of the output's weights, such as 12GB")
    format: Literal["compact", "vanilla"] = "compact"
    router: Literal["redirect", "keep", "mean"] = Field(
        default="redirect",
        description="all router rows and a map; or one row per expert: the leader's, or the group's mean",
    )
    sequential: bool = Field(
        False, description="a layer's statistics come from a model whose earlier layers are compressed already"
    )
    multiple_of: int = Field(1, ge=1, description="experts per layer come in multiples of this (expert parallelism)")
    capacity: int | None = Field(None, ge=1, description="token limit of an expert in Switch-like layers")
    precision: Literal["auto", "stored", "float32"] = Field(
        default="auto", description="of the calibration's forward passes; auto is float32 on a CPU, as stored elsewhere"
    )
    seed: int = 0
    calibration: CalibrationData = Field(default_factory=CalibrationData)
    plan: PlanSection = Field(default_factory=PlanSection)
    align: AlignSection = Field(default_factory=AlignSection)
    merge: MergeSection = Field(default_factory=MergeSection)
    refit: RefitSection = Field(default_factory=RefitSection)
    decompose: DecomposeSection = Field(default_factory=DecomposeSection)

    @field_validator("keep", mode="before")
    @classmethod
    def _keep(cls, value: Any) -> Any:
        if isinstance(value, bool) or (isinstance(value, (int, float)) and value <= 0):
            raise ValueError(f"must be positive, not {value}")
        if isinstance(value, float) and value > 1:
            raise ValueError(f"with a decimal point it is a fraction of the experts, so at most 1.0, not {value}")
        return value

    @model_validator(mode="after")
    def _components_exist(self) -> Recipe:
        for place in PLACES:
            self.component(place)
        self.rivals()
        operator, alignment = self.component("merge.operator"), self.component("align.method")
        if not operator.aligns and alignment.name != "none":
            raise MoepressError(f"{operator.name} matches hidden units in its own way: use align.method=none")
        return self

    def component(self, place: str) -> Any:
        """The object that stands at a place such as `plan.saliency`."""
        section, _, field = place.partition(".")
        return create(PLACES[place], getattr(getattr(self, section), field), place)

    def rivals(self) -> tuple[Any, ...]:
        """The saliencies that compete with `plan.saliency`."""
        return tuple(create(SALIENCIES, rival, "plan.rivals") for rival in self.plan.rivals)

    def decomposition(self) -> Decomposition | None:
        """How the experts are decomposed; None: they are not."""
        given = self.decompose
        if given.rank is None:
            return None
        importance = Importance(given.reduce, given.smoothing)
        return Decomposition(given.rank, given.ratio, given.whiten, given.along, importance, given.refit)

    @property
    def keeps_all(self) -> bool:
        """Whether the method leaves as many experts as there are."""
        return not METHODS.get(self.method).fewer

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_yaml())

    def to_yaml(self) -> str:
        """What the method uses, as it stands; the rest would be refused when the file is read again."""
        uses = METHODS.get(self.method).uses
        flat = flatten(self.model_dump(mode="json", exclude_none=True))
        return yaml.safe_dump(
            nest({k: v for k, v in flat.items() if k in uses or k not in method_entries()}), sort_keys=False
        )


def create(registry: Registry[Any], component: Component, place: str) -> Any:
    """Make a registered component from its recipe entry; unknown names and parameters are errors."""
    given = {"name": component} if isinstance(component, str) else dict(component)
    cls = registry.get(str(given.pop("name", "")))
    known = [field.name for field in dataclasses.fields(cls)]
    if unknown := [name for name in given if name not in known]:
        hint = did_you_mean(unknown[0], known) if known else "it has no parameters"
        raise MoepressError(f"{place}: {cls.name!r} has no parameter {unknown[0]!r}: {hint}")
    try:
        return TypeAdapter(cls).validate_python(given)
    except ValidationError as error:
        raise MoepressError(f"{place}: {_first(error)}") from None


def make_recipe(*given: dict[str, Any]) -> Recipe:
    """A recipe from nested or dotted keys, later ones over earlier ones. What is not given comes from the preset,
    then from the method. A given knob that the method does not use is an error.
    """
    flat: dict[str, Any] = {}
    for entries in given:
        flat |= flatten(entries)
    method = METHODS.get(str(flat.get("method", Recipe.model_fields["method"].default)))
    for key in flat:
        if key in method_entries() and key not in method.uses:
            raise MoepressError(
                f"method {method.name!r} does not use {key!r}; it uses {', '.join(sorted(method.uses))}"
            )
    if not method.fewer and (given_size := [key for key in ("keep", "target_size") if flat.get(key) is not None]):
        raise MoepressError(f"method {method.name!r} keeps all experts: leave {given_size[0]} out")
    filled = dict(method.defaults)
    if preset := flat.get("preset"):
        if preset not in method.presets:
            hint = did_you_mean(str(preset), list(method.presets)) if method.presets else "it has no presets"
            raise MoepressError(f"method {method.name!r} has no preset {preset!r}: {hint}")
        filled |= method.presets[str(preset)]
    if flat.get("format") == "vanilla":
        filled |= VANILLA
    if operator := flat.get("merge.operator"):
        name = operator if isinstance(operator, str) else str(operator.get("name", ""))
        filled |= {} if MERGES.get(name).aligns else {"align.method": "none"}
    if "seed" in flat:
        filled["calibration.seed"] = flat["seed"]
    return _validate(nest(filled | flat))


VANILLA = {"plan.budget": "uniform", "router": "keep", "plan.skip": "none"}
"""What a vanilla checkpoint needs, where the recipe does not say otherwise: one count, and rows instead of a map."""


def method_entries() -> set[str]:
    """The entries that mean something to some methods only."""
    return {f"{section}.{name}" for section in SECTIONS for name in _fields(section)} | {"router", "sequential"}


def load_recipe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The entries of a YAML recipe, not yet filled or checked."""
    try:
        given = yaml.safe_load(Path(path).read_text())
    except FileNotFoundError:
        raise MoepressError(f"there is no recipe at {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise MoepressError(f"the recipe {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", error)).partition("\n")[0]
        raise MoepressError(f"the recipe {path} is not YAML{where}: {problem}") from None
    if not isinstance(given, dict):
        raise MoepressError(f"the recipe {path} must be a mapping of options")
    return given


def flatten(given: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections to dotted keys; a component's mapping (with its `name`) stays whole."""
    flat: dict[str, Any] = {}
    for key, value in given.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and dotted in (*SECTIONS, "calibration"):
            flat |= flatten(value, f"{dotted}.")
        else:
            flat[dotted] = value
    return flat


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        section, dot, field = key.partition(".")
        if dot:
            inner = nested.setdefault(section, {})
            if not isinstance(inner, dict):
                raise MoepressError(f"recipe: {section!r} must be a mapping of options")
            inner[field] = value
        else:
            nested[key] = value
    return nested


def _fields(section: str) -> list[str]:
    annotation = Recipe.model_fields[section].annotation
    return list(getattr(annotation, "model_fields", None) or [f.name for f in dataclasses.fields(annotation)])  # type: ignore[arg-type]


def _validate(nested: dict[str, Any]) -> Recipe:
    for section, known in (("", list(Recipe.model_fields)), *((s, _fields(s)) for s in (*SECTIONS, "calibration"))):
        entries = nested if not section else nested.get(section, {})
        if not isinstance(entries, dict) and not dataclasses.is_dataclass(entries):
            raise MoepressError(f"recipe: {section!r} must be a mapping of options")
        for key in entries if isinstance(entries, dict) else ():
            if key not in known:
                where = f"{section}.{key}" if section else key
                raise MoepressError(f"recipe: unknown key {where!r}: {did_you_mean(str(key), known)}")
    try:
        return Recipe.model_validate(nested)
    except ValidationError as error:
        raise MoepressError(f"recipe: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
