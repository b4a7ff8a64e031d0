"""A disk that is full or cannot be written: one sentence, and nothing half-written."""

from __future__ import annotations

import contextlib
import errno
import os

import pytest
import torch
from tests.experiments.train import tiny
from tests.experiments.train.test_loop import without_clock

from apo_experiments import records
from apo_experiments.errors import UserError
from apo_experiments.files import append, write_atomically
from apo_experiments.train import train
from apo_experiments.training import Checkpoint

resource = pytest.importorskip("resource")


@contextlib.contextmanager
def room_for(size):
    """Let no file of this process grow beyond ``size`` bytes: the kernel then cuts writes short, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_after(monkeypatch, writes, partial=0):
    """Let the given number of writes succeed; the next ones put down ``partial`` bytes and then fail."""
    write, left = os.write, [writes]

    def limited(handle, content):
        left[0] -= 1
        if left[0] >= 0:
            return write(handle, content)
        if left[0] == -1 and partial:
            return write(handle, bytes(content)[:partial])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", limited)


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_an_atomic_write_on_a_full_disk_leaves_the_old_file(tmp_path):
    write_atomically(tmp_path / "file", b"old")
    with room_for(1000), pytest.raises(UserError, match="file cannot be written because the disk is full"):
        write_atomically(tmp_path / "file", bytes(5000))
    assert (tmp_path / "file").read_bytes() == b"old"
    assert files(tmp_path) == ["file"]


def test_an_append_on_a_full_disk_leaves_the_file_as_it_was(tmp_path):
    write_atomically(tmp_path / "file", b"one\n")
    with room_for(1000), pytest.raises(UserError, match="disk is full"):
        append(tmp_path / "file", bytes(5000))
    assert (tmp_path / "file").read_bytes() == b"one\n"
    append(tmp_path / "file", b"two\n")
    assert (tmp_path / "file").read_bytes() == b"one\ntwo\n"


def test_an_interrupted_atomic_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", b"new")
    assert files(tmp_path) == []


def test_a_link_stays_a_link_and_its_target_is_written(tmp_path):
    (tmp_path / "target").write_bytes(b"old")
    for name in ("target", "not there yet"):
        (tmp_path / "link").symlink_to(name)
        write_atomically(tmp_path / "link", b"new")
        assert (tmp_path / "link").is_symlink() and (tmp_path / name).read_bytes() == b"new"
        (tmp_path / "link").unlink()
    assert files(tmp_path) == ["not there yet", "target"]


def test_a_pipe_stays_a_pipe_and_is_written(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(tmp_path / "pipe", b"new")
        assert (tmp_path / "pipe").is_fifo() and os.read(reader, 10) == b"new"
    finally:
        os.close(reader)


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(tmp_path):
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save({"step": 1})
    with room_for(5000), pytest.raises(UserError, match=r"checkpoint\.pt cannot be written because the disk is full"):
        checkpoint.save({"step": 2, "weights": torch.zeros(100_000)})
    assert checkpoint.load(torch.device("cpu")) == {"step": 1}
    assert files(tmp_path) == ["checkpoint.pt"]


@pytest.mark.parametrize("partial", [0, 10])
@pytest.mark.parametrize("writes", range(12))
def test_a_run_on_a_disk_that_fills_up_is_told_in_one_sentence_and_goes_on_later(
    writes, partial, tmp_path, monkeypatch
):
    """Whichever write is the first to fail: lock, header, row, checkpoint."""
    whole = train(tiny.config(), root=tmp_path / "whole")
    with monkeypatch.context() as patch:
        full_after(patch, writes, partial)
        with pytest.raises(UserError, match="cannot be written because the disk is full: free some space") as caught:
            train(tiny.config(), root=tmp_path, checkpoint_seconds=0)
    assert "\n" not in str(caught.value)
    folder = tiny.config().directory(tmp_path)
    assert set(files(folder)) <= {records.NAME, "checkpoint.pt"}
    if (folder / records.NAME).exists():
        content = (folder / records.NAME).read_bytes()
        assert content.endswith(b"\n") and b"\n\n" not in content
    assert without_clock(train(tiny.config(), root=tmp_path).rows) == without_clock(whole.rows)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError, match=r"cannot be written \(.*\): fix that or choose another place with --runs"):
        train(tiny.config(), root=tmp_path / "runs")


def test_a_slow_disk_is_written_less_often(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("apo_experiments.training.time.monotonic", lambda: now[0])
    checkpoint = Checkpoint(tmp_path, every_seconds=60)

    def slow(path, content):
        now[0] += 10

    monkeypatch.setattr("apo_experiments.training.write_atomically", slow)
    now[0] = 60
    assert checkpoint.due()
    checkpoint.save({})
    now[0] = 70 + 199
    assert not checkpoint.due()
    now[0] = 70 + 200
    assert checkpoint.due()
