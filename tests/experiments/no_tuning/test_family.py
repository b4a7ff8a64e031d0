"""The family of recipes is complete, and its tasks hold data out."""

from __future__ import annotations

import importlib.util
import types

import pytest
import torch

from apo_experiments.commands import options
from apo_experiments.commands.run import planned, shared_out
from apo_experiments.errors import UserError
from apo_experiments.methods import METHODS
from apo_experiments.methods.packages import PACKAGES
from apo_experiments.recipe import Setting
from apo_experiments.recipes import plan
from apo_experiments.recipes.no_tuning import CHOOSING, RATES, RECIPES, USUAL, label_of

ARGUMENTS = {"scale": "smoke", "set": None, "epochs": None, "seeds": 1, "device": "cpu", "compile": False}


def test_the_name_of_the_family_stands_for_all_of_its_tasks():
    assert [recipe.name for recipe in options.recipes(["no-tuning"])] == list(RECIPES)
    assert set(CHOOSING) < set(RECIPES)


def test_the_scale_cpu_is_planned_for_less_than_an_hour():
    assert sum(recipe.scales["cpu"].minutes for recipe in RECIPES.values()) < 60


def test_every_task_has_every_method_and_muon_only_where_there_are_matrices():
    for recipe in RECIPES.values():
        labels = {entry.label for entry in recipe.entries}
        assert {label_of(base, rate) for base, rates in RATES.items() for rate in rates} <= labels
        assert ("Muon-APO" in labels) == ("cifar" not in recipe.name)
    assert all(len(rates) == 7 for rates in RATES.values())
    assert all(rate in RATES[base] for base, rate in USUAL.items())


def test_three_tasks_have_two_batch_sizes_and_four_have_two_lengths():
    names = [name.removeprefix("no-tuning-") for name in RECIPES]
    assert sum("-batch" in name for name in names) >= 3 and sum(name.endswith("-long") for name in names) >= 4


@pytest.mark.parametrize("name", RECIPES)
def test_a_task_reports_held_out_data_test_data_and_a_guess(name):
    recipe = RECIPES[name]
    config = plan(recipe, "smoke", ["SGDm-cosine-0.1"])[0]
    assert recipe.task is not None
    problem = recipe.task(config.options, Setting(0, torch.device("cpu"), None))
    metrics = problem.evaluate(problem.model)
    assert {recipe.metric, recipe.metric.replace("test_", "valid_"), "guess"} <= set(metrics)
    assert problem.model.training


def test_a_pattern_names_several_methods():
    runs = plan(RECIPES["no-tuning-protein"], "smoke", ["nadamw-cosine-*", "DoG"])
    assert [run.label for run in runs] == [*(label_of("NadamW", rate) for rate in RATES["NadamW"]), "DoG"]


def test_every_method_of_a_package_says_which():
    assert set(PACKAGES) < {name for name, method in METHODS.items() if method.needs} < set(METHODS)


@pytest.mark.parametrize("method", [None, ["*"]])
def test_a_method_whose_package_is_missing_is_left_out_with_a_sentence(method, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arguments = types.SimpleNamespace(**ARGUMENTS, method=method, best=False, best_of=None)
    labels = {config.label for config in planned(RECIPES["no-tuning-protein"], arguments, method)[0]}
    assert "SGDm-APO" in labels and not labels & {"Prodigy", "DoG", "Mechanic", "AdamG", "Schedule-Free-SGD"}
    assert "no-tuning-protein runs without DoG: pip install dog-optimizer for them." in capsys.readouterr().err


def test_a_method_that_was_asked_for_is_not_left_out(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arguments = types.SimpleNamespace(**ARGUMENTS, method=["DoG"], best=False, best_of=None)
    assert [config.label for config in planned(RECIPES["no-tuning-protein"], arguments, ["DoG"])[0]] == ["DoG"]


def test_a_method_runs_on_the_tasks_that_have_it(capsys):
    lenet, protein = RECIPES["no-tuning-cifar10-lenet"], RECIPES["no-tuning-protein"]
    shares = shared_out([lenet, protein], ["Muon-APO", "SGDm-APO"])
    assert shares == [(lenet, ["SGDm-APO"]), (protein, ["Muon-APO", "SGDm-APO"])]
    assert "no-tuning-cifar10-lenet runs without Muon-APO, which it does not have." in capsys.readouterr().err
    assert shared_out([lenet, protein], ["Muon-*"]) == [(protein, ["Muon-*"])]
    assert shared_out([protein], None) == [(protein, None)]


def test_a_method_that_no_task_has_is_left_for_the_message():
    recipes = [RECIPES["no-tuning-cifar10-lenet"], RECIPES["no-tuning-protein"]]
    (recipe, labels), _ = shared_out(recipes, ["SGDm-APO", "lion"])
    with pytest.raises(UserError, match="has no method 'lion': choose one of SGDm"):
        plan(recipe, "smoke", labels)
