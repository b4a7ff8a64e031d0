"""What overrules what when a recipe becomes runs."""

import pytest
import torch

from apo_experiments.errors import UserError
from apo_experiments.recipe import Entry, Recipe, Scale
from apo_experiments.recipes import RECIPES, plan


def recipe(**changes):
    fields = {
        "name": "tiny",
        "title": "",
        "paper": "",
        "task": lambda options, setting: None,
        "defaults": {"batch_size": 128, "rows": None, "precision": "float32"},
        "data": (),
        "scales": {"smoke": Scale(3, 2, 0.1, {"batch_size": 16, "rows": 5}, {"APO": {"interval": 2}})},
        "entries": (Entry("SGDm", "sgdm", {"lr": 0.5}), Entry("APO", "sgdm-apo", {"interval": 7}, options={"rows": 9})),
        "metric": "loss",
        "goal": "min",
    }
    return Recipe(**(fields | changes))


def by_label(runs):
    return {run.label: run for run in runs if run.seed == 0}


def test_an_entrys_hyperparameters_overrule_the_methods_and_the_scales_overrule_the_entrys():
    runs = by_label(plan(recipe(), "smoke"))
    assert runs["SGDm"].hyper["lr"] == 0.5 and runs["SGDm"].hyper["momentum"] == 0.9
    assert runs["APO"].hyper["interval"] == 2


def test_an_entrys_options_overrule_the_scales_which_overrule_the_tasks():
    runs = by_label(plan(recipe(), "smoke"))
    assert runs["SGDm"].options == {"batch_size": 16, "rows": 5, "precision": "float32"}
    assert runs["APO"].options["rows"] == 9


def test_overrides_are_last_and_reach_only_the_methods_that_have_them():
    runs = by_label(plan(recipe(), "smoke", overrides={"interval": "4", "rows": "3", "epochs": "8"}))
    assert runs["APO"].hyper["interval"] == 4 and "interval" not in runs["SGDm"].hyper
    assert [run.options["rows"] for run in runs.values()] == [3, 3]
    assert [run.epochs for run in runs.values()] == [8, 8]


def test_seeds_are_the_scales_or_a_number_or_a_list():
    seeds = lambda **choice: [run.seed for run in plan(recipe(), "smoke", ["sgdm"], **choice)]  # noqa: E731
    assert seeds() == [0, 1]
    assert seeds(seeds=3) == [0, 1, 2]
    assert seeds(seeds=[7, 5]) == [7, 5]


def test_task_and_method_agree_on_the_precision():
    for run in plan(recipe(), "smoke", overrides={"precision": "bf16-autocast"}):
        assert run.options["precision"] == run.hyper["precision"] == "bf16-autocast"
    for scale, precision in (("smoke", "bf16"), ("cpu", "bf16"), ("paper", "fp16")):
        for run in plan(RECIPES["low-precision-lenet"], scale):
            assert run.options["precision"] == run.hyper["precision"] == precision


def test_a_network_in_16_bits_is_refused_where_the_task_cannot_cast_it():
    uncast = recipe(defaults={"batch_size": 128, "rows": None})
    for precision in ("bf16", "fp16"):
        with pytest.raises(UserError, match=f"tiny cannot cast its network to {precision}: .* bf16-autocast"):
            plan(uncast, "smoke", overrides={"precision": precision})
    assert plan(uncast, "smoke", overrides={"precision": "bf16-autocast"})[0].hyper["precision"] == "bf16-autocast"


@pytest.mark.parametrize(
    ("key", "value"), [("lr", "nan"), ("lr", float("inf")), ("batch_size", "1e999"), ("milestones", "0.5,-inf")]
)
def test_numbers_that_are_not_finite_are_refused(key, value):
    with pytest.raises(UserError, match=f"{key} was .*: numbers must be finite"):
        plan(recipe(), "smoke", overrides={key: value})


def test_the_same_plan_is_the_same_run_and_another_setting_another():
    first, again = (plan(recipe(), "smoke")[0].identity() for _ in range(2))
    assert first == again != plan(recipe(), "smoke", overrides={"lr": "0.4"})[0].identity()


def test_planning_draws_no_random_numbers():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    plan(RECIPES["cifar10-lenet"], "paper")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "wrong", [Entry("SGDm", "sgdm", {"learning_rate": 0.5}), Entry("SGDm", "sgdm", options={"batchsize": 3})]
)
def test_a_recipe_that_sets_what_is_not_known_is_refused(wrong):
    with pytest.raises(UserError, match=r"tiny sets '(learning_rate|batchsize)' for SGDm, which knows no such setting"):
        plan(recipe(entries=(wrong,)), "smoke")
