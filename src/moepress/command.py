"""The one command that makes an output again, from what was saved of it."""

from __future__ import annotations

import json
import shlex
from typing import Any

from moepress.recipe import Recipe, flatten, make_recipe, method_entries

OPTIONS = {
    "method": "--method",
    "preset": "--preset",
    "keep": "--keep",
    "target_size": "--target-size",
    "calibration.source": "--calibration",
    "calibration.samples": "--samples",
    "calibration.length": "--length",
    "calibration.batch_size": "--batch-size",
    "format": "--format",
    "router": "--router",
    "multiple_of": "--multiple-of",
    "seed": "--seed",
}
"""Recipe entries with an option of their own; the others are given with --set."""


def compress_command(recipe: Recipe, model: str, out: str, more: dict[str, str] | None = None) -> str:
    """`moepress compress …` with every entry that differs from what the method does by itself."""
    words = ["moepress", "compress", model, "-o", out, "--method", recipe.method]
    chosen: dict[str, Any] = {"method": recipe.method} | ({"preset": recipe.preset} if recipe.preset else {})
    if recipe.format == "vanilla":
        chosen["format"] = "vanilla"
    if recipe.seed:
        chosen["seed"] = recipe.seed  # also that of the calibration
    own, plain = entries(recipe), entries(make_recipe(chosen))
    for name, value in chosen.items():
        if name != "method":
            words += [OPTIONS[name], str(value)]
    for name, value in own.items():
        if name in chosen or value == plain.get(name):
            continue
        words += [OPTIONS[name], str(value)] if name in OPTIONS else ["--set", f"{name}={json.dumps(value)}"]
    for option, value in (more or {}).items():
        words += [option, value]
    return shlex.join(words)


def entries(recipe: Recipe) -> dict[str, Any]:
    """What the method uses, with dotted names."""
    from moepress.methods import METHODS

    uses = METHODS.get(recipe.method).uses
    flat = flatten(recipe.model_dump(mode="json"))
    return {name: value for name, value in flat.items() if name in uses or name not in method_entries()}
