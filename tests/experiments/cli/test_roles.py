"""Trials of sweeps and results: which run is which, and one that is both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apo_experiments import records
from apo_experiments.publication import compact
from apo_experiments.tuning import current

WORDS = ("little-mlp", "--scale", "paper", "--set", "data=generated", "--method", "SGD")


@pytest.fixture
def given(apo, monkeypatch):
    """Carry out a command whose records say that it was another one, or the same."""

    def command(subcommand, *words, told=()):
        monkeypatch.setattr("sys.argv", ["apo", subcommand, *told, *WORDS])
        return apo("run" if subcommand == "sweep" else subcommand, *WORDS, *words)

    return command


def swept(given, *rates):
    for rate in rates:
        assert given("sweep", "--seeds", "1", "--set", f"lr={rate}").code == 0


def found():
    return {(record.config.hyper["lr"], record.config.seed): record for record in records.find(Path("runs"))}


def test_a_run_that_a_sweep_has_trained_is_a_result_once_apo_run_asks_for_it(apo, given, registries):
    swept(given, 1e-9, 0.3)
    assert given("run", "--best", "--seeds", "1").code == 0
    best, other = found()[0.3, 0], found()[1e-9, 0]
    assert not best.is_swept and best.is_trial and best.chosen_by["points"] == 2
    assert other.is_swept and other.chosen_by is None
    assert current(registries["little-mlp"], "paper", [best, other]) == [best]
    assert "little-mlp: 1 run, and " in apo("publish", "--to", "results").out
    (published,) = compact.find(Path("results"))
    assert published.header["command"] == ["apo", "run", *WORDS] and published.header["chosen_by"]["points"] == 2
    assert len(Path("results/little-mlp/paper/tuning.jsonl").read_text().splitlines()) == 2


def test_a_trial_that_became_a_result_is_still_a_trial_and_the_other_seeds_of_the_result_are_none(given):
    swept(given, 1e-9, 0.3)
    for _ in range(2):
        assert given("run", "--best", "--seeds", "2").code == 0
    runs = found()
    assert set(runs) == {(1e-9, 0), (0.3, 0), (0.3, 1)}
    assert given("run", "--best", "--seeds", "3").code == 0
    origin = found()[0.3, 2].chosen_by
    assert (origin["points"], origin["seeds"]) == (2, 1)
    assert origin["commands"] == [["apo", "sweep", *WORDS]]


def test_runs_by_hand_are_no_trials_where_nothing_is_held_out(given):
    assert given("run", "--seeds", "1").code == 0
    done = given("run", "--best")
    assert done.code == 2 and "nothing was tried" in done.err


def test_a_folder_that_is_called_sweep_makes_no_sweep_of_a_run(given):
    assert given("run", "--seeds", "1", told=["--debug"]).code == 0
    (record,) = records.find(Path("runs"))
    record.header["command"] += ["--runs", "sweep"]
    assert not record.is_swept


def test_a_note_leaves_the_rest_of_the_record_as_it_was(given):
    swept(given, 0.3)
    (path,) = Path("runs").rglob(records.NAME)
    header, *rest = path.read_text().splitlines()
    assert given("run", "--seeds", "1", "--set", "lr=0.3").code == 0
    noted, *same = path.read_text().splitlines()
    note = json.loads(noted).pop("run")
    assert same == rest and json.loads(noted) == {**json.loads(header), "run": note}
    assert note == {"command": ["apo", "run", *WORDS]}
