"""A deadline ends a run between two steps, and the same call resumes it as if nothing had happened."""

from __future__ import annotations

import types

import pytest
from tests.experiments.train import tiny
from tests.experiments.train.test_loop import Notes, without_clock

from apo_experiments import interruption
from apo_experiments.interruption import TimeIsUp
from apo_experiments.train import train
from apo_experiments.training import Training


@pytest.fixture
def clock(monkeypatch):
    """A clock that each training step moves by a second."""
    now, advance = types.SimpleNamespace(time=0.0), Training.advance

    def step(run):
        advance(run)
        now.time += 1

    monkeypatch.setattr(Training, "advance", step)
    monkeypatch.setattr(interruption, "time", types.SimpleNamespace(time=lambda: now.time))
    return now


def test_the_run_stops_after_the_step_at_which_time_is_up_and_goes_on_exactly(clock, tmp_path):
    whole = train(tiny.config("adam"), root=tmp_path / "whole")
    clock.time, notes = 0.0, Notes()
    with pytest.raises(TimeIsUp):
        train(tiny.config("adam"), root=tmp_path, listener=notes, deadline=7)
    assert clock.time == 7 and "stopped after step 7 of 20" in notes.messages[-1]
    assert without_clock(train(tiny.config("adam"), root=tmp_path, deadline=100).rows) == without_clock(whole.rows)
    assert clock.time == 20


def test_after_the_deadline_nothing_begins_but_what_is_finished_is_returned(clock, tmp_path):
    with pytest.raises(TimeIsUp):
        train(tiny.config(), root=tmp_path, deadline=0)
    assert list(tmp_path.iterdir()) == []
    record = train(tiny.config(), root=tmp_path)
    assert train(tiny.config(), root=tmp_path, deadline=0) == record


def test_a_kill_costs_at_most_twenty_seconds_of_work(monkeypatch, tmp_path):
    """By default; saving that takes longer than a second makes checkpoints rarer."""
    from apo_experiments.train import Checkpoint

    made = []
    monkeypatch.setattr(
        Checkpoint, "__init__", lambda self, *a, real=Checkpoint.__init__: (real(self, *a), made.append(self))[0]
    )
    train(tiny.config(), root=tmp_path)
    assert made[0].every_seconds <= 20


def test_the_header_says_who_chose_the_hyperparameters(tmp_path):
    origin = {"metric": "valid_loss", "points": 12}
    assert train(tiny.config(), root=tmp_path, chosen_by=origin).header["chosen_by"] == origin
    assert "chosen_by" not in train(tiny.config(seed=5), root=tmp_path).header
