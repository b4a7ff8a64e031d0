"""Which points a grid has, in which order, and when two sweeps are the same."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from tests.experiments.sweep import tiny

from apo_experiments.errors import UserError
from apo_experiments.recipes.figure_1 import RECIPES
from apo_experiments.sweep.grid import Order, _entries, coarse_to_fine, searches


def smoke(recipe, labels=None, **options):
    return searches(recipe, Order(recipe.name, Path(), labels, "smoke", **options))


@pytest.mark.parametrize("sizes", [(1,), (2,), (9,), (6, 8), (4, 3, 2), ()])
def test_every_combination_comes_once(sizes):
    axes = {f"axis {position}": list(range(size)) for position, size in enumerate(sizes)}
    found = [tuple(point.values()) for point in coarse_to_fine(axes)]
    assert sorted(found) == sorted(itertools.product(*axes.values()))


def test_the_first_points_are_spread_over_the_whole_grid():
    rates = [point["lr"] for point in coarse_to_fine({"lr": range(9)})]
    assert rates[0] == 4
    assert {rate // 3 for rate in rates[:3]} == {0, 1, 2}
    both = coarse_to_fine({"lr": range(7), "damping": range(7)})
    # The first nine are a coarse grid of three by three, so every quarter of the fine one is met.
    assert {(point["lr"], point["damping"]) for point in both[:9]} == set(itertools.product((1, 3, 5), repeat=2))


def test_a_value_that_is_given_twice_is_tried_once():
    entry = replace(tiny.recipe().entries[0], grid={"lr": [1e-3, 3e-4, 3e-4, 1e-4]})
    (search,) = smoke(tiny.recipe(entries=(entry,)), None)
    assert search.axes == {"lr": (1e-3, 3e-4, 1e-4)} and len(search.points) == 3


def test_sweeps_share_a_study_only_if_they_train_the_same_runs():
    def name(recipe=None, **options):
        return smoke(recipe or tiny.recipe(), ["Descent"], **options)[0].name

    finer = replace(tiny.recipe().entries[0], grid={"lr": (*tiny.RATES, 0.3)})
    assert name() == name(device="cuda") == name(seeds=1)
    others = [
        name(seeds=2),
        name(overrides={"epochs": 5}),
        name(overrides={"missing": True}),
        name(tiny.recipe(entries=(finer,))),
        name(tiny.recipe(metric="train_loss")),
        name(tiny.recipe(goal="max")),
        smoke(tiny.recipe(), ["Other"])[0].name,
    ]
    assert len({name(), *others}) == 1 + len(others)


def test_each_point_has_one_run_for_each_seed():
    (search,) = smoke(tiny.recipe(), ["Other"], seeds=2, device="cuda")
    assert [config.seed for config in search.points[0].configs] == [0, 1]
    for point in search.points:
        for config in point.configs:
            assert (config.hyper, config.device) == ({"lr": point.hyper["lr"], "crash_at": 7.0}, "cuda")


@pytest.mark.parametrize("no", [False, "false", "0"])
def test_a_sweep_on_test_data_is_refused_where_some_can_be_held_out(no):
    with pytest.raises(UserError, match="a sweep of parabola without validation data would tune on the test data"):
        smoke(tiny.recipe(), None, overrides={"validation": no})
    assert smoke(tiny.recipe(), None, overrides={"validation": "true"})
    assert smoke(tiny.recipe(metric="train_loss"), None, overrides={"validation": no})


def test_a_recipe_that_computes_has_the_keys_that_its_entries_name():
    recipe = RECIPES["figure-1"]
    with pytest.raises(UserError, match="--grid was given 'lr', which no method of figure-1 has"):
        smoke(recipe, None, grid={"lr": ["1"]})
    ((entry, grid),) = _entries(recipe, ["FSD-1"], {"fsd_weight": ["1", "2"]})
    assert (entry.label, grid) == ("FSD-1", {"fsd_weight": ("1", "2")})


def test_labels_may_be_given_in_any_case():
    assert [search.label for search in smoke(tiny.recipe(), ["OTHER", "descent"])] == ["Descent", "Other"]
    assert [search.label for search in smoke(tiny.recipe(), ["*E*t*"])] == ["Descent"]  # and as patterns


def test_a_grid_of_ones_own_replaces_an_axis_where_there_is_one_and_adds_it_where_none_is():
    (descent, other) = smoke(tiny.recipe(), None, grid={"lr": ["0.5", "2"]})[:2]
    assert descent.axes == other.axes == {"lr": (0.5, 2.0)}
    (fixed,) = smoke(tiny.recipe(), ["Fixed"], grid={"crash_at": (1.0, None)})
    assert [point.hyper for point in fixed.points] == [{"crash_at": None}, {"crash_at": 1.0}]
    with pytest.raises(UserError, match="--grid was given 'damping', which no method of parabola has"):
        smoke(tiny.recipe(), None, grid={"damping": (1.0,)})
