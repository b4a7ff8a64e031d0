"""Choices and scores of the benchmark against values that were computed by hand."""

from __future__ import annotations

import pytest
from tests.experiments.no_tuning.made_up import run

from apo_experiments.no_tuning.scores import calibrated, regret, scores, standings, task_runs, tuned
from apo_experiments.recipes.no_tuning import RATES, RECIPES, label_of

ACCURACY, LOSS = RECIPES["no-tuning-digits-mlp"], RECIPES["no-tuning-protein"]


def cosines(task: str, base: str, tests: list[float | None], valids: list[float] | None = None):
    """One run for each of the seven rates."""
    pairs = zip(RATES[base], tests, valids or [None] * 7, strict=True)
    return [run(task, label_of(base, rate), test, valid) for rate, test, valid in pairs]


def loss_task(*more):
    """Tuned losses of 0.5 with SGDm and 0.4 with AdamW; a guess has 1."""
    sgdm = cosines("protein", "SGDm", [None, 0.6, 0.5, 0.7, 0.8, 0.9, 0.95])
    adamw = cosines("protein", "AdamW", [0.9, 0.8, 0.4, 0.6, 0.7, 0.8, 0.9])
    return scores(task_runs([LOSS], "cpu", [*sgdm, *adamw, *more])).set_index("method", drop=False)


def test_regret_of_an_accuracy_is_relative_to_the_best():
    assert regret(ACCURACY, 90.0, best=96.0, guess=10.0) == pytest.approx(100 * 6 / 96)
    assert regret(ACCURACY, 98.0, best=96.0, guess=10.0) == pytest.approx(-100 * 2 / 96)


def test_regret_of_a_loss_is_relative_to_what_the_best_has_learned():
    assert regret(LOSS, 0.55, best=0.5, guess=1.0) == pytest.approx(10.0)
    assert regret(LOSS, 0.45, best=0.5, guess=1.0) == pytest.approx(-10.0)


@pytest.mark.parametrize("found", [None, float("nan"), 7.0])
def test_regret_is_at_most_100(found):
    assert regret(LOSS, found, best=0.5, guess=1.0) == 100.0


def test_held_out_data_choose_the_tuned_rate_and_test_data_do_not():
    runs = cosines("digits-mlp", "SGDm", [99, 98, 97, 96, 95, 94, 93], valids=[80, 81, 97, 90, 90, 90, 90])
    ((recipe, by_label),) = task_runs([ACCURACY], "cpu", runs).values()
    assert tuned(recipe, by_label, "SGDm") == "SGDm-cosine-0.1"
    assert tuned(recipe, by_label, "AdamW") is None


def test_one_rate_is_calibrated_over_all_tasks_together():
    # The best rate of each task (the first, the third) is bad on the other; the second is good on both.
    one = cosines("protein", "NadamW", [0.50, 0.55, 0.90, 0.9, 0.9, 0.9, None])
    other = cosines("digits-mlp", "NadamW", [50.0, 95.0, 96.0, 60.0, 50.0, 50.0, 50.0])
    tasks = task_runs([LOSS, ACCURACY], "cpu", [*one, *other])
    assert calibrated(tasks) == label_of("NadamW", RATES["NadamW"][1])
    only = {name: task for name, task in tasks.items() if name.endswith("protein")}
    assert calibrated(only) == label_of("NadamW", RATES["NadamW"][0])


def test_a_task_without_all_rates_does_not_calibrate():
    assert calibrated(task_runs([LOSS], "cpu", cosines("protein", "NadamW", [0.5] * 7)[1:])) is None


def test_each_method_is_compared_with_the_tuned_rate_of_its_own_base():
    task = loss_task(run("protein", "SGDm-APO", 0.55), run("protein", "AdamW-APO", 0.34), run("protein", "DoG", 0.6))
    assert task["regret"].round(6).to_dict() == {
        "SGDm-APO": 10.0,
        "AdamW-APO": -10.0,
        "DoG": 20.0,
        "SGDm tuned": 0.0,
        "AdamW tuned": 0.0,
        "SGDm usual": 0.0,
        "AdamW usual": round(100 * 0.3 / 0.6, 6),
    }


def test_mean_and_spread_are_over_seeds_and_a_run_that_learned_nothing_is_dead():
    seeds = [run("protein", "SGDm-APO", value, seed=seed) for seed, value in enumerate([0.5, 0.6, None, 0.98])]
    score = loss_task(*seeds).loc["SGDm-APO"]
    assert (score.runs, score.dead) == (4, 2)  # 0.98 is 4% of what the reference has learned
    assert score["mean"] == pytest.approx(2.08 / 3) and score.spread == pytest.approx(0.25325, abs=1e-4)
    assert score.regret == pytest.approx((0 + 20 + 100 + 96) / 4)


def test_at_equal_time_a_slow_run_is_cut_off():
    # The reference takes 10 s. Half-way between 8 s (0.8) and 12 s (0.5) the loss is 0.65: 30% is missing.
    slow = run("protein", "SGDm-APO", 0.5, seconds=12.0, curve=[(8.0, 0.8), (12.0, 0.5)])
    score = loss_task(slow).loc["SGDm-APO"]
    assert score.regret == pytest.approx(0.0) and score.regret_at_equal_time == pytest.approx(30.0)
    assert score.relative_time == pytest.approx(1.2)


def test_at_equal_time_a_fast_run_has_its_end():
    score = loss_task(run("protein", "SGDm-APO", 0.5, seconds=5.0)).loc["SGDm-APO"]
    assert score.regret_at_equal_time == score.regret == pytest.approx(0.0)


def test_ranks_are_among_methods_without_tuning_and_averaged_over_tasks():
    first = loss_task(run("protein", "SGDm-APO", 0.45), run("protein", "Prodigy", None), run("protein", "DoG", 0.6))
    table = standings(first.reset_index(drop=True))
    # 0.45, 0.5 (SGDm usual), 0.6, 0.7 (AdamW usual), diverged
    assert list(table.index[:2]) == ["SGDm tuned", "AdamW tuned"] and table["rank"][:2].isna().all()
    assert table["rank"][2:].to_dict() == {
        "SGDm-APO": 1,
        "SGDm usual": 2,
        "DoG": 3,
        "AdamW usual": 4,
        "Prodigy": 5,
    }
    assert (table.dead["Prodigy"], table.runs["Prodigy"]) == (1, 1)
    assert (table.near["SGDm-APO"], table.near["DoG"]) == (1, 0)
    assert (table.worst["DoG"], table.worst_task["DoG"]) == (pytest.approx(20.0), "no-tuning-protein")


def test_a_task_without_tuned_rates_is_not_scored():
    assert scores(task_runs([LOSS], "cpu", [run("protein", "SGDm-APO", 0.5)])).empty


def test_equals_share_the_mean_of_their_ranks():
    made = [run("protein", name, 0.45) for name in ("SGDm-APO", "Prodigy")]
    assert loss_task(*made)["rank"].loc[["SGDm-APO", "Prodigy"]].to_list() == [1.5, 1.5]
