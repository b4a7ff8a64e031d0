"""Who is alive."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from apo_experiments import locks
from apo_experiments.errors import UserError
from apo_experiments.sweep import presence

ROOT = Path(__file__).parents[3]

WORKER = """
import sys, time
from pathlib import Path
sys.path.insert(0, "src")
from apo_experiments.sweep.presence import present
with present(Path(sys.argv[1])) as card:
    print(repr(card), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def worker(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    yield process, eval(process.stdout.readline())
    process.kill()
    process.communicate()


@pytest.mark.skipif(locks.fcntl is None, reason="needs flock")
def test_a_killed_worker_is_gone_and_a_living_one_is_not(tmp_path, worker):
    process, card = worker
    assert not presence.is_gone(card, tmp_path)
    process.kill()
    process.wait()
    assert presence.is_gone(card, tmp_path)


def test_nothing_is_concluded_about_another_machine_or_a_lock_that_cannot_be_seen(tmp_path, worker):
    process, card = worker
    process.kill()
    process.wait()
    assert not presence.is_gone(card | {"machine": "another"}, tmp_path)
    assert not presence.is_gone(card | {"locked": False}, tmp_path)
    assert not presence.is_gone(card, tmp_path / "elsewhere")
    assert not presence.is_gone({}, tmp_path)


def test_the_heart_beats_on_after_a_beat_that_failed():
    counts = []

    def beat(count):
        counts.append(count)
        if count == 1:
            raise ConnectionError("the database is away")

    with presence.beating(beat, 0.005):
        deadline = time.monotonic() + 10
        while len(counts) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
    assert counts[:3] == [1, 2, 3]
    after = len(counts)
    time.sleep(0.05)
    assert len(counts) == after


def test_a_folder_that_cannot_be_made_gets_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"), presence.present(tmp_path / "file"):
        pass
