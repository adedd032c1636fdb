"""Recipes: what is written is what is done; whatever is not understood or not used is an error."""

from __future__ import annotations

import pytest
import yaml

from moepress.errors import MoepressError
from moepress.fit import parse_size
from moepress.recipe import PLACES, flatten, load_recipe, make_recipe, nest

BAD = {
    "method: m-smo": "did you mean 'm-smoe'",
    "kep: 8": "unknown key 'kep': did you mean 'keep'",
    "plan: {similarty: random}": "unknown key 'plan.similarty'",
    "plan: {similarity: router-logit}": "did you mean 'router-logits'",
    "plan: {similarity: {name: random, sed: 3}}": "has no parameter 'sed'",
    "plan: 3": "must be a mapping",
    "preset: papr": "did you mean 'paper'",
    "keep: 0": "keep: must be positive",
    "keep: -1": "keep: must be positive",
    "keep: 1.5": "is a fraction",
    "keep: true": "keep: must be positive",
    "format: vanila": "format",
    "multiple_of: 0": "multiple_of",
    "calibration: {sampels: 3}": "unknown key 'calibration.sampels': did you mean 'samples'",
    "calibration: {samples: 0}": "samples",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_recipes_say_what_is_wrong(text):
    with pytest.raises(MoepressError, match=BAD[text]) as caught:
        make_recipe({"method": "m-smoe"}, yaml.safe_load(text))
    assert "\n" not in str(caught.value)


def test_later_entries_win_and_dots_are_sections():
    recipe = make_recipe(
        {"method": "m-smoe", "plan": {"similarity": "random"}, "keep": 4},
        {"plan.similarity": "router-weight", "keep": 0.5},
    )
    assert recipe.plan.similarity == "router-weight" and recipe.keep == 0.5


def test_round_trip(tmp_path):
    merging = {"method": "m-smoe", "plan.similarity": {"name": "random"}}
    recipe = make_recipe({"keep": 0.5, "calibration.source": "a.jsonl", **merging})
    recipe.save(tmp_path / "r.yaml")
    assert make_recipe(load_recipe(tmp_path / "r.yaml")) == recipe


def test_vanilla_changes_defaults_but_not_choices():
    assert make_recipe({"method": "m-smoe", "format": "vanilla"}).router == "keep"
    assert make_recipe({"method": "m-smoe", "format": "vanilla", "router": "mean"}).router == "mean"
    assert make_recipe({"method": "m-smoe", "format": "vanilla"}).plan.budget == "uniform"


def test_preset_and_seed():
    assert make_recipe({"method": "m-smoe", "preset": "paper"}).align.reference == "first"
    assert make_recipe({"seed": 7}).calibration.seed == 7
    assert make_recipe({"seed": 7, "calibration.seed": 1}).calibration.seed == 1


def test_flatten_and_nest_are_inverse():
    given = {"keep": 3, "plan": {"similarity": {"name": "random"}, "skip": ["a", "b"]}}
    assert nest(flatten(given)) == given


@pytest.mark.parametrize("place", PLACES)
def test_every_component_is_documented(place):
    for name, cls in PLACES[place]:
        assert cls.__doc__ and not cls.__doc__.startswith(cls.__name__ + "("), name


@pytest.mark.parametrize("text, size", [("12GB", 12 * 10**9), ("1.5 GiB", 3 * 2**29), ("700k", 700_000), ("5", 5)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "1.2.3GB", "12XB", "-3GB", "nan"])
def test_bad_sizes(text):
    with pytest.raises(MoepressError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("content", ["- a", "a: [", "\x00", "3"])
def test_bad_files(tmp_path, content):
    (tmp_path / "r.yaml").write_text(content)
    with pytest.raises(MoepressError):
        load_recipe(tmp_path / "r.yaml")
    with pytest.raises(MoepressError, match="no recipe"):
        load_recipe(tmp_path / "absent.yaml")
