"""Workers that share a study: a point is never tried twice at a time, and never lost."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
from tests.experiments.sweep import tiny

from apo_experiments.sweep.database import address, open_database
from apo_experiments.sweep.grid import Order, searches
from apo_experiments.sweep.ledger import Ledger
from apo_experiments.sweep.presence import present

ME, YOU = {"name": "me"}, {"name": "you"}


def open_ledger(tmp_path):
    """Open the study as another process would: with a connection of its own."""
    (search,) = searches(tiny.recipe(), Order("parabola", Path(), ["Descent"], "smoke"))
    return Ledger(search, open_database(address(None, tmp_path)))


def states(ledger):
    return Counter(trial.state.name for trial in ledger._trials())


def test_two_workers_never_hold_the_same_point(tmp_path):
    mine, yours = open_ledger(tmp_path), open_ledger(tmp_path)
    held = [ledger.claim(card).index for _ in range(3) for ledger, card in ((mine, ME), (yours, YOU))]
    assert held == [0, 1, 2, 3, 4, 5]
    assert mine.claim(ME) is None and yours.claim(YOU) is None


def test_of_two_claims_at_the_same_moment_the_older_stands(tmp_path):
    mine, yours = open_ledger(tmp_path), open_ledger(tmp_path)
    look, claims = mine._trials, []

    def look_and_be_overtaken():
        seen = look()
        if not claims:
            claims.append(None)
            claims[0] = yours.claim(YOU)
        return seen

    mine._trials = look_and_be_overtaken  # I see that point 0 is free, and you are faster
    claim = mine.claim(ME)
    assert (claims[0].index, claim.index) == (0, 1)
    assert states(mine) == {"RUNNING": 2, "FAIL": 1}


def test_a_point_is_free_again_once_its_trial_has_failed(tmp_path):
    mine, yours = open_ledger(tmp_path), open_ledger(tmp_path)
    first = mine.claim(ME)
    assert mine.fail(first)
    assert yours.claim(YOU).index == first.index
    assert mine.claim(ME).index == 1


def test_a_finished_point_stays_finished(tmp_path):
    mine, yours = open_ledger(tmp_path), open_ledger(tmp_path)
    claim = mine.claim(ME)
    assert mine.finish(claim, 1.5, "test_loss")
    assert not mine.fail(claim) and not yours.finish(claim, 0.1, "test_loss")
    assert [row["value"] for row in yours.rows()] == [1.5]
    assert yours.claim(YOU).index == 1


def test_a_silent_worker_loses_its_point_and_its_late_result_does_not_count(tmp_path):
    mine, yours = open_ledger(tmp_path), open_ledger(tmp_path)
    claim = mine.claim(ME)
    assert yours.fail_the_dead(tmp_path, 0.0) == []  # the first look
    mine.beat(claim, 1)
    assert yours.fail_the_dead(tmp_path, 0.0) == []  # it lives
    assert yours.fail_the_dead(tmp_path, 0.0) == [0]
    taken_over = yours.claim(YOU)
    assert taken_over.index == 0 and yours.finish(taken_over, 2.0, "test_loss")
    assert not mine.finish(claim, 1.0, "test_loss")
    assert [row["value"] for row in mine.rows()] == [2.0]


def test_a_worker_that_died_before_its_first_heartbeat_is_noticed_too(tmp_path):
    ledger = open_ledger(tmp_path)
    ledger.claim(YOU)
    assert [ledger.fail_the_dead(tmp_path, 0.0) for _ in range(2)] == [[], [0]]


def test_the_trial_of_a_worker_on_this_machine_is_freed_by_its_death_alone(tmp_path):
    ledger = open_ledger(tmp_path)
    with present(tmp_path) as card:
        ledger.claim(card)
        assert ledger.fail_the_dead(tmp_path, 1e9) == []
        left_behind = tmp_path / "copy"
        (tmp_path / card["name"]).rename(left_behind)
    left_behind.rename(tmp_path / card["name"])  # what remains after kill -9: the file, without its lock
    assert ledger.fail_the_dead(tmp_path, 1e9) == [0]
    assert not (tmp_path / card["name"]).exists()


@pytest.mark.slow
def test_many_workers_at_once_finish_every_point_once(tmp_path):
    finished, barrier = [], threading.Barrier(6)

    def work(name):
        ledger = open_ledger(tmp_path)
        barrier.wait()
        while claim := ledger.claim({"name": name}):
            finished.append(claim.index)
            assert ledger.finish(claim, float(claim.index), "test_loss")

    threads = [threading.Thread(target=work, args=(f"worker {number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(finished) == list(range(6))
    assert states(open_ledger(tmp_path))["COMPLETE"] == 6
