"""`apo run --best`: where the settings come from, and that it says so."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from apo_experiments import records

WORDS = ("little-mlp", "--scale", "smoke", "--method", "SGD")
SHARED = ("--storage", "sqlite:///shared.db")


@pytest.fixture
def told(apo, monkeypatch):
    """Carry out a command whose records say what it was."""

    def command(*words):
        monkeypatch.setattr("sys.argv", ["apo", *words])
        return apo(*words)

    return command


def chosen(root="runs"):
    """Return the rate of the run that --best has made; seed 1 is never one of the sweep's."""
    (run,) = [record for record in records.find(Path(root)) if record.config.seed == 1]
    return run.config.hyper["lr"], run.header["chosen_by"]


@pytest.fixture
def swept(told):
    """Sweep on two machines with one database, so that each has the records of its own points only."""
    assert told("sweep", *WORDS, *SHARED, "--grid", "lr=0.3", "--runs", "far").code == 0
    done = told("sweep", *WORDS, *SHARED, "--grid", "lr=1e-9", "--runs", "near")
    assert done.code == 0
    return done.out


def test_the_best_of_a_shared_database_is_taken_although_the_records_here_have_another(told, swept):
    done = told("run", *WORDS, *SHARED, "--best", "--runs", "near", "--seeds", "2")
    assert done.code == 0
    rate, origin = chosen("near")
    assert rate == 0.3 and origin["points"] == 2
    assert "little-mlp SGD: lr=0.3 (test_loss " in done.err and "the best of 2 points of 2 epochs in sqlite" in done.err


def test_a_machine_without_records_finds_it_too(told, swept):
    done = told("run", *WORDS, *SHARED, "--best", "--runs", "new", "--seeds", "2")
    assert done.code == 0 and chosen("new")[0] == 0.3


def test_the_database_is_known_from_the_records_and_none_takes_the_records_themselves(told, swept):
    done = told("run", *WORDS, "--best", "--runs", "near", "--seeds", "2")
    assert done.code == 0 and chosen("near")[0] == 0.3 and "was swept in sqlite:///shared.db" in done.err
    (other,) = Path("near").rglob("seed1-*")
    shutil.rmtree(other)
    done = told("run", *WORDS, "--best", "--storage", "none", "--runs", "near", "--seeds", "2")
    assert done.code == 0 and chosen("near")[0] == 1e-9 and "the only point" in done.err and "in near)" in done.err


def test_a_password_is_not_in_the_records_and_has_to_be_given_again(told, swept):
    for path in Path("near").rglob(records.NAME):
        path.write_text(path.read_text().replace("sqlite:///shared.db", "postgresql://me:***@host/apo"))
    done = told("run", *WORDS, "--best", "--runs", "near")
    assert done.code == 2 and "give the address postgresql://me:***@host/apo with --storage" in done.err


def test_the_command_that_a_sweep_suggests_names_the_database(told, swept, registries):
    (line,) = [line for line in swept.splitlines() if line.endswith("--best --storage sqlite:///shared.db")]
    done = told(*shlex.split(line)[1:])
    assert done.code == 0 and "lr=0.3" in done.err


def test_a_storage_without_best_is_refused(apo):
    done = apo("run", *WORDS, *SHARED)
    assert done.code == 2 and "add --best" in done.err and not Path("runs").exists()


def test_records_decide_where_no_database_was_named_and_that_is_printed_too(told):
    assert told("sweep", *WORDS, "--grid", "lr=1e-9,0.3").code == 0
    done = told("run", *WORDS, "--best", "--seeds", "2")
    assert done.code == 0 and chosen()[0] == 0.3
    assert "little-mlp SGD: lr=0.3 (test_loss " in done.err and "the best of 2 points of 2 epochs in runs)" in done.err


def test_the_end_says_where_the_records_are_and_what_comes_next(told):
    done = told("run", *WORDS, "--runs", "elsewhere")
    assert done.err.endswith(
        "The records are in elsewhere. `apo report --runs elsewhere` writes a page with all figures and tables.\n"
    )
