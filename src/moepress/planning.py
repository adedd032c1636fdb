"""What a plan is made from: the planner that a recipe describes, and the facts about layers."""

from __future__ import annotations

from functools import partial

from moepress.errors import MoepressError
from moepress.models.layer import ExpertBank, MoELayer
from moepress.models.visit import LayerVisit
from moepress.observe import Statistics
from moepress.plan import LayerFacts, Planner
from moepress.recipe import Recipe


def check_statistics(statistics: Statistics, layers: list[MoELayer], planner: Planner, recipe: Recipe) -> None:
    """Saved statistics must be of this model and hold what the method needs."""
    if recipe.sequential:
        raise MoepressError("sequential compression gathers its statistics as it goes: it cannot use saved ones")
    for layer in layers:
        for name in planner.needs:
            sums = statistics.of(layer, name)
            if name == "usage" and len(sums["count"]) != layer.num_experts:
                raise MoepressError(
                    f"the statistics of {layer.name!r} are of a model with {len(sums['count'])} experts"
                )


def planner_of(recipe: Recipe) -> Planner:
    return Planner(
        saliency=recipe.component("plan.saliency"),
        similarity=recipe.component("plan.similarity"),
        budget=recipe.component("plan.budget"),
        grouping=recipe.component("plan.grouping"),
        guard=recipe.component("plan.guard"),
        router=recipe.router,
        member_weights=recipe.component("merge.operator").weights,
        weigh_by=recipe.component("merge.operator").weigh_by,
        multiple_of=recipe.multiple_of,
        rivals=recipe.rivals(),
    )


def rounding_note(planner: Planner, counts: dict[str, int], skipped: set[str], average: float) -> list[str]:
    """A sentence where every layer keeps another number of experts than was asked for."""
    count = next(count for name, count in counts.items() if name not in skipped)
    if not planner.budget.one_count or count == int(average + 1e-9):
        return []
    return [f"every layer keeps {count} experts, not {average:.4g}: its router or multiple_of wants that"]


def read_bank(layer: MoELayer) -> ExpertBank:
    with layer.weights.at_hand(layer):
        return layer.bank


def facts_of(layers: list[MoELayer] | LayerVisit, statistics: Statistics, recipe: Recipe) -> list[LayerFacts]:
    """Of layers, or of the one that is being visited."""
    visit, given = (layers, [layers.layer]) if isinstance(layers, LayerVisit) else (None, layers)
    return [
        LayerFacts(
            name=layer.name,
            index=layer.index,
            read_bank=partial(read_bank, layer),
            router=layer.router,
            statistics={name: s.sums for name, s in statistics.layers.get(layer.name, {}).items()},
            seed=recipe.seed,
            visit=visit,
        )
        for layer in given
    ]
