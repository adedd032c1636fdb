"""Statistics of one calibration text, gathered once for all rows that can use the same."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from moepress.data.batches import calibration_batches
from moepress.models.find import find_layers
from moepress.models.walk import walk
from moepress.models.weights import Weights
from moepress.observe import Statistics, from_gradients
from moepress.pipeline import calibration_dtype
from moepress.planning import planner_of
from moepress.recipe import Recipe


def can_share(recipe: Recipe) -> bool:
    """Not if a layer's statistics come from a model that is compressed so far, or belong to the order of hidden units
    that a row's own alignment makes, as gradients do."""
    planner = planner_of(recipe)
    return not (recipe.sequential or recipe.keeps_all or planner.saliency.needs_visit or from_gradients(planner.needs))


class SharedStatistics:
    def __init__(
        self, place: tuple[str, int], original: PreTrainedModel, tokenizer: Any, recipes: list[Recipe]
    ) -> None:
        self.place, self.original, self.tokenizer = place, original, tokenizer
        self.recipes = [recipe for recipe in recipes if can_share(recipe)]
        self._made: Statistics | None = None

    def of(self, recipe: Recipe) -> Statistics | None:
        """None: it has to gather its own."""
        if not can_share(recipe):
            return None
        if self._made is None:
            self._made = self._gather()
        return self._made

    def _gather(self) -> Statistics:
        recipe, model = self.recipes[0], self.original
        shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        text = calibration_batches(recipe.calibration, self.tokenizer, model.config, shift=shift)
        needs = sorted({name for recipe in self.recipes for name in planner_of(recipe).needs})
        layers = find_layers(model)
        found = Statistics()
        weights = Weights.of(model)
        with weights.widened(calibration_dtype(recipe, weights.device)):
            for visit in walk(model, text, layers=layers):
                found.gather(visit, needs)
        return found
