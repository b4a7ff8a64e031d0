"""A sweep in one process: what it tries, what it finds, and what it does when something goes wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import optuna
import pytest
from tests.experiments.sweep import tiny

from apo_experiments import records, sweep, tuning
from apo_experiments.errors import UserError
from apo_experiments.recipes import RECIPES, plan
from apo_experiments.sweep.database import address, open_database
from apo_experiments.train import Listener, train


class Notes(Listener):
    def __init__(self):
        self.messages, self.ended = [], []

    def finished(self, record):
        self.ended.append(record.config.hyper["lr"])

    def message(self, text):
        self.messages.append(text)


def run(tmp_path, recipe=None, labels=("Descent",), jobs=1, listener=None, **options):
    RECIPES["parabola"] = recipe or tiny.recipe()
    order = sweep.Order("parabola", tmp_path, labels and list(labels), "smoke", **options)
    return sweep.run(order, jobs, lambda: listener or Listener())


def begun(log):
    """Return how often each rate was trained, resumed runs included."""
    return Counter(float(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("begin"))


def trials(tmp_path, state="COMPLETE"):
    url = address(None, tmp_path)
    (name,) = optuna.get_all_study_names(url)
    found = optuna.load_study(study_name=name, storage=url).trials
    return [trial for trial in found if trial.state.name == state]


def test_every_point_is_tried_once_and_the_best_comes_first(tmp_path, log):
    rows = run(tmp_path)
    assert begun(log) == dict.fromkeys(tiny.RATES, 1)
    # After n = 8 steps the loss is (1 - lr)^(2n) / 2.
    expected = {rate: (1 - rate) ** 16 / 2 for rate in tiny.RATES if rate < 2}
    assert [row["hyper"]["lr"] for row in rows] == [*sorted(expected, key=lambda rate: expected[rate]), 3.0]
    for row in rows[:-1]:
        assert row["value"] == pytest.approx(10 + expected[row["hyper"]["lr"]], rel=1e-12)
    assert sorted(trial.params["lr"] for trial in trials(tmp_path)) == list(tiny.RATES)


def test_a_run_that_diverges_is_the_worst_whatever_the_goal(tmp_path, registries):
    row = run(tmp_path / "min")[-1]
    assert (row["hyper"], row["value"], row["outcome"]) == ({"lr": 3.0}, None, "diverged")
    assert max(trial.value for trial in trials(tmp_path / "min")) == float("inf")
    registries["parabola"] = upwards = tiny.recipe(goal="max")
    rows = run(tmp_path / "max", upwards)
    assert (rows[0]["hyper"], rows[-1]["outcome"]) == ({"lr": 0.125}, "diverged")
    assert min(trial.value for trial in trials(tmp_path / "max")) == float("-inf")


def test_validation_data_choose_where_the_task_can_hold_some_out(tmp_path, registries):
    assert {row["metric"] for row in run(tmp_path / "held out")} == {"valid_loss"}
    registries["parabola"] = about_training = tiny.recipe(metric="train_loss")
    rows = run(tmp_path / "training", about_training)
    assert {row["metric"] for row in rows} == {"train_loss"}
    (record, *_) = records.find(tmp_path / "training")
    assert record.config.options["validation"] is False


def test_the_same_sweep_again_trains_nothing(tmp_path, log):
    first = run(tmp_path)
    before = log.read_text()
    assert run(tmp_path) == first
    assert log.read_text() == before
    assert len(trials(tmp_path)) == len(tiny.RATES)


def test_a_new_study_finds_the_runs_that_are_there(tmp_path, log):
    first = run(tmp_path)
    before = log.read_text()
    assert run(tmp_path, storage=f"sqlite:///{tmp_path}/other.db") == first
    assert log.read_text() == before


def test_a_run_that_was_there_before_is_a_trial_from_then_on(tmp_path):
    (config,) = plan(tiny.recipe(), "smoke", ["Descent"], 1, {"lr": 0.5, "validation": True})
    assert not train(config, root=tmp_path).is_trial
    run(tmp_path)
    (record,) = [record for record in records.find(tmp_path) if record.config.hyper["lr"] == 0.5]
    assert record.is_trial and record.finished and record.rows


def test_a_budget_of_trials_is_a_total_and_can_be_raised(tmp_path, log):
    for budget, total in ((2, 2), (2, 2), (5, 5), (1000, 6)):
        rows = run(tmp_path, trials=budget)
        assert (len(rows), len(begun(log))) == (min(budget, 6), total)
    assert set(begun(log).values()) == {1}


def test_the_mean_over_seeds_decides(tmp_path):
    single, mean = run(tmp_path), run(tmp_path, seeds=3)
    by_rate = {row["hyper"]["lr"]: row["value"] for row in single}
    for row in mean[:-1]:
        assert row["value"] == pytest.approx(by_rate[row["hyper"]["lr"]] + 100)
        assert row["seeds"] == 3


def test_all_methods_with_a_grid_are_swept_by_default(tmp_path):
    rows = run(tmp_path, labels=None)
    assert Counter(row["method"] for row in rows) == {"Descent": 6, "Other": 2}


def test_a_run_that_fails_neither_stops_the_others_nor_counts_as_tried(tmp_path, log, monkeypatch):
    notes = Notes()
    advance, broken = tiny.Descent.step, [True]

    def step(self, inputs, target):
        if broken and self.hyper["lr"] == 0.5:
            raise RuntimeError("out of luck")
        return advance(self, inputs, target)

    monkeypatch.setattr(tiny.Descent, "step", step)
    rows = run(tmp_path, listener=notes)
    assert Counter(row["outcome"] for row in rows) == {"finished": 4, "diverged": 1, "failed": 1}
    assert (rows[-1]["hyper"], rows[-1]["outcome"], rows[-1]["value"]) == ({"lr": 0.5}, "failed", None)
    assert any("lr=0.5: failed with RuntimeError: out of luck" in text for text in notes.messages)
    broken.clear()
    rows = run(tmp_path)
    assert Counter(row["outcome"] for row in rows) == {"finished": 5, "diverged": 1}
    assert begun(log) == dict.fromkeys(tiny.RATES, 1) | {0.5: 2}


def test_what_the_user_can_mend_ends_the_sweep_and_leaves_the_point_free(tmp_path, log):
    with pytest.raises(UserError, match="the data are missing"):
        run(tmp_path, overrides={"missing": True})
    assert len(trials(tmp_path, "FAIL")) == 1 and not trials(tmp_path, "RUNNING")


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path, log, monkeypatch):
    whole = run(tmp_path / "whole")
    monkeypatch.setenv("TINY_LOG", str(tmp_path / "second log"))
    advance, taken = tiny.Descent.step, [0]

    def step(self, inputs, target):
        taken[0] += 1
        if taken[0] == 20:
            raise KeyboardInterrupt
        return advance(self, inputs, target)

    with monkeypatch.context() as patch:
        patch.setattr(tiny.Descent, "step", step)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts")
    assert len(trials(tmp_path / "parts")) == 2 and not trials(tmp_path / "parts", "RUNNING")
    assert run(tmp_path / "parts") == whole
    again = begun(tmp_path / "second log")
    assert set(again) == set(tiny.RATES) and again.total() == 7
    assert len(trials(tmp_path / "parts")) == 6


def test_a_key_that_is_set_is_not_searched(tmp_path):
    (row,) = run(tmp_path, overrides={"lr": 0.25, "epochs": 1})
    assert row["hyper"] == {} and row["value"] == pytest.approx(10 + 0.75**8 / 2)


def test_a_database_tells_what_was_tried_without_any_record(tmp_path):
    storage = f"sqlite:///{tmp_path}/shared.db"
    rows = run(tmp_path / "here", storage=storage, seeds=2, overrides={"epochs": 3})
    found = sweep.tried("parabola", "smoke", storage)
    assert sorted(record.config.hyper["lr"] for record in found) == list(tiny.RATES)
    hyper, origin = tuning.choose(tiny.recipe(), "Descent", "smoke", found, {"missing": False})
    assert hyper == {"lr": 1.0, "crash_at": None} and origin["hyper"] == rows[0]["hyper"]
    del origin["recipe"], origin["hyper"], origin["commands"]
    assert origin == {"metric": "valid_loss", "value": rows[0]["value"], "epochs": 3, "points": 6, "seeds": 2}
    with pytest.raises(UserError, match="run `apo sweep parabola --scale smoke --method Other` first"):
        tuning.choose(tiny.recipe(), "Other", "smoke", found, {})


def test_a_study_from_before_can_be_read_once_the_same_sweep_has_been_run_again(tmp_path):
    storage = f"sqlite:///{tmp_path}/shared.db"
    run(tmp_path, storage=storage)
    database = open_database(storage)
    with database.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM study_user_attributes")
    assert sweep.tried("parabola", "smoke", storage) == []
    run(tmp_path, storage=storage)
    assert len(sweep.tried("parabola", "smoke", storage)) == 6


def test_asking_a_database_that_never_was_creates_nothing(tmp_path):
    assert sweep.tried("parabola", "smoke", f"sqlite:///{tmp_path}/sweeps.db") == []
    assert list(tmp_path.iterdir()) == []


def test_values_that_are_no_numbers_can_be_searched(tmp_path, registries):
    entry = replace(tiny.recipe().entries[0], grid={"lr": [1.0], "crash_at": [None, (1, 2), "never"]})
    registries["parabola"] = recipe = tiny.recipe(entries=(entry,))
    assert [row["hyper"]["crash_at"] for row in run(tmp_path, recipe)] == [(1, 2), None, "never"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"labels": ["Descend"]}, "has no method 'Descend': choose one of Descent, Other, Fixed."),
        ({"labels": ["Fixed"]}, "Fixed has no grid in parabola: choose one of Descent, Other."),
        ({"recipe": tiny.recipe(entries=())}, "has no grids to sweep: use `apo run parabola`"),
        ({"recipe": tiny.recipe(scales={})}, "has no scale 'smoke'"),
        ({"storage": "studies.db"}, "must be a URL such as"),
        ({"storage": "oracel://me@host/name"}, "is not a valid URL"),
        ({"storage": "postgresql://me:secret@127.0.0.1:1/name"}, r"me:\*\*\*@127.0.0.1:1/name cannot be opened"),
    ],
)
def test_mistakes_get_one_sentence(tmp_path, options, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        run(tmp_path, **options)
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)


def test_a_file_that_is_no_database_gets_one_sentence(tmp_path):
    (tmp_path / "notes.txt").write_text("milk, bread, " * 100)
    with pytest.raises(UserError, match="file is not a database"):
        run(tmp_path, storage=f"sqlite:///{tmp_path}/notes.txt")
