from __future__ import annotations

import os

import pytest

from apo_experiments.errors import UserError
from apo_experiments.locks import locked

fcntl = pytest.importorskip("fcntl")


def test_a_second_holder_is_refused_and_the_first_is_named(tmp_path):
    with locked(tmp_path / "lock"):
        sentence = rf"^[^\n]* is being trained by another process \({os.getpid()} on [^\n]*$"
        with pytest.raises(UserError, match=sentence), locked(tmp_path / "lock"):
            pass
        assert (tmp_path / "lock").exists()
    with locked(tmp_path / "lock"):
        pass


def test_a_lock_that_a_dead_process_left_is_taken_over(tmp_path):
    (tmp_path / "lock").write_text("999999 on a machine that is no more, with a long name")
    with locked(tmp_path / "lock"):
        assert (tmp_path / "lock").read_text().startswith(f"{os.getpid()} on ")
        assert (tmp_path / "lock").read_text().count("\n") == 1


def test_an_error_gives_the_lock_back(tmp_path):
    with pytest.raises(RuntimeError), locked(tmp_path / "lock"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_was_deleted_meanwhile_is_made_anew(tmp_path, monkeypatch):
    """Its owner deletes the file between our opening and our locking it: a lock on that ghost protects nothing."""
    flock, calls = fcntl.flock, []

    def late(handle, operation):
        calls.append(handle)
        if len(calls) == 1:
            (tmp_path / "lock").unlink()
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path / "lock"):
        assert len(calls) == 2
        with pytest.raises(UserError), locked(tmp_path / "lock"):
            pass


def test_a_file_system_without_locks_does_not_stop_training(tmp_path, monkeypatch):
    def unsupported(handle, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with locked(tmp_path / "lock"):
        pass
