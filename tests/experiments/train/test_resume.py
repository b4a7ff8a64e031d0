"""A run that was stopped, in whichever way, ends as if it had not been."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from tests.experiments.train import tiny
from tests.experiments.train.test_loop import Notes, without_clock
from tests.programs import Program

from apo_experiments import records
from apo_experiments.errors import UserError
from apo_experiments.train import train
from apo_experiments.training import Checkpoint, Training


class Killed(BaseException):
    """Stands for a power cut: nobody catches it."""


def stop_at(monkeypatch, step, save_at=(), error=Killed):
    """Save after the given steps, and break off in the middle of the step after ``step``."""
    advance, taken = Training.advance, [0]

    def watched(run):
        if run.step == step:
            next(run.problem.model.parameters()).data.fill_(7.0)  # half a step: worthless weights
            raise error
        advance(run)
        taken[0] = run.step

    monkeypatch.setattr(Training, "advance", watched)
    monkeypatch.setattr(Checkpoint, "due", lambda checkpoint: taken[0] in save_at)


def interrupted(method, tmp_path, stop, save_at):
    config = tiny.config(method)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, stop, save_at)
        with pytest.raises(Killed):
            train(config, root=tmp_path)
    assert not records.read(config.directory(tmp_path) / records.NAME).finished
    return config


def assert_same(whole, resumed):
    assert without_clock(resumed.rows) == without_clock(whole.rows)
    assert resumed.summary["metrics"] == whole.summary["metrics"]
    assert without_clock([resumed.summary["best"]]) == without_clock([whole.summary["best"]])
    assert resumed.summary["steps"] == whole.summary["steps"]


@pytest.mark.parametrize(
    ("stop", "save_at"),
    [
        (3, ()),  # killed before the first checkpoint
        (8, (7,)),  # in the middle of an epoch
        (5, (5,)),  # right after a row
        (18, (4, 8)),  # two rows after the last checkpoint, which are written again
        (19, (20,)),
    ],
)
@pytest.mark.parametrize("method", tiny.NAMES)
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(method, stop, save_at, tmp_path):
    whole = train(tiny.config(method), root=tmp_path / "whole")
    config = interrupted(method, tmp_path, stop, save_at)
    torch.manual_seed(99)
    notes = Notes()
    resumed = train(config, root=tmp_path, listener=notes)
    assert_same(whole, resumed)
    saved = [step for step in save_at if step <= stop]
    assert notes.messages == ([f"resuming from step {saved[-1]} of 20"] if saved else [])
    assert [path.name for path in config.directory(tmp_path).iterdir()] == [records.NAME]


def test_the_seconds_of_all_sessions_add_up(tmp_path):
    config = interrupted("sgdm", tmp_path, 9, (8,))
    path = config.directory(tmp_path) / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    torch.save(state | {"seconds": 1000.0}, path)
    record = train(config, root=tmp_path)
    assert record.rows[0]["seconds"] < 1000 < record.rows[1]["seconds"] < record.summary["seconds"] < 1100


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(number, tmp_path, monkeypatch):
    whole = train(tiny.config("apo-rate"), root=tmp_path / "whole")
    config, notes = tiny.config("apo-rate"), Notes()
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    advance = Training.advance

    def signalled(run):
        if run.step == 6:
            os.kill(os.getpid(), number)
        advance(run)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "advance", signalled)
        with pytest.raises(KeyboardInterrupt):
            train(config, root=tmp_path, listener=notes)
    assert notes.messages == ["stopped after step 7 of 20; run the same command to resume"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    notes = Notes()
    assert_same(whole, train(config, root=tmp_path, listener=notes))
    assert notes.messages == ["resuming from step 7 of 20"]


def test_a_second_signal_does_not_wait_for_the_step(tmp_path, monkeypatch):
    def stuck(run):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("unreachable")

    monkeypatch.setattr(Training, "advance", stuck)
    with pytest.raises(KeyboardInterrupt):
        train(tiny.config(), root=tmp_path)


def test_an_interruption_at_the_last_moment_still_reaches_the_caller(tmp_path, monkeypatch):
    def diverge(run):
        os.kill(os.getpid(), signal.SIGINT)
        raise FloatingPointError("at the same moment")

    monkeypatch.setattr(Training, "advance", diverge)
    with pytest.raises(KeyboardInterrupt):
        train(tiny.config(), root=tmp_path)
    assert train(tiny.config(), root=tmp_path).summary["diverged"]


def test_it_trains_outside_the_main_thread(tmp_path):
    done = []
    thread = threading.Thread(target=lambda: done.append(train(tiny.config(), root=tmp_path)))
    thread.start()
    thread.join()
    assert done[0].finished


@pytest.mark.parametrize(
    ("finished", "left"),
    [(False, ["record.jsonl.tmp", "checkpoint.pt.tmp"]), (True, ["checkpoint.pt", "checkpoint.pt.tmp"])],
)
def test_what_a_killed_process_left_is_cleared_away(finished, left, tmp_path):
    config = tiny.config()
    config.directory(tmp_path).mkdir(parents=True)
    if finished:
        train(config, root=tmp_path)
    for name in left:
        (config.directory(tmp_path) / name).write_text("half")
    assert train(config, root=tmp_path).finished
    assert [path.name for path in config.directory(tmp_path).iterdir()] == [records.NAME]


def test_lost_rows_make_the_run_start_anew(tmp_path):
    whole = train(tiny.config(), root=tmp_path / "whole")
    config, notes = interrupted("sgdm", tmp_path, 13, (12,)), Notes()
    path = config.directory(tmp_path) / records.NAME
    path.write_bytes(path.read_bytes()[:-5])
    resumed = train(config, root=tmp_path, listener=notes)
    assert_same(whole, resumed)
    assert "has lost rows, so the run starts again" in notes.messages[0]


def test_a_damaged_checkpoint_is_named_in_one_sentence(tmp_path):
    config = interrupted("sgdm", tmp_path, 13, (12,))
    path = config.directory(tmp_path) / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(UserError, match=r"checkpoint\.pt is damaged \(.*\): delete it, and run the same command"):
        train(config, root=tmp_path)
    path.unlink()
    assert train(config, root=tmp_path).finished


def test_a_checkpoint_of_another_network_is_named_in_one_sentence(tmp_path):
    config = interrupted("sgdm", tmp_path, 13, (12,))
    path = config.directory(tmp_path) / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state["model"].pop("0.weight")
    torch.save(state, path)
    with pytest.raises(UserError, match="does not fit this version of the program"):
        train(config, root=tmp_path)


@pytest.mark.parametrize("lost", ["step", "device", "stepper"])
def test_a_checkpoint_without_all_its_parts_is_named_in_one_sentence(lost, tmp_path):
    config = interrupted("sgdm", tmp_path, 13, (12,))
    path = config.directory(tmp_path) / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    del state[lost]
    torch.save(state, path)
    with pytest.raises(UserError, match=r"checkpoint\.pt does not fit .* \(KeyError\): delete it"):
        train(config, root=tmp_path)


def test_a_record_whose_summary_is_damaged_is_that_of_an_unfinished_run(tmp_path):
    whole = train(tiny.config(), root=tmp_path)
    path = tiny.config().directory(tmp_path) / records.NAME
    *lines, _ = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines) + '{"kind": "summary", "metrics": null}\n')
    assert_same(whole, train(tiny.config(), root=tmp_path))


def test_a_run_from_another_kind_of_device_goes_on_and_says_so(tmp_path):
    config, notes = interrupted("sgdm", tmp_path, 13, (12,)), Notes()
    path = config.directory(tmp_path) / "checkpoint.pt"
    torch.save(torch.load(path, weights_only=True) | {"device": "cuda"}, path)
    assert train(config, root=tmp_path, listener=notes).finished
    assert notes.messages[-1] == "the run started on cuda; on cpu it continues, but not bit for bit"


def worker(*arguments):
    return Program("tests.experiments.train.worker", *arguments)


def finish(process):
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


@pytest.mark.slow
@pytest.mark.parametrize("method", tiny.NAMES)
def test_a_killed_process_loses_nothing(method, tmp_path):
    whole = train(tiny.config(method), root=tmp_path / "whole")
    assert finish(worker(tmp_path, method, "--save-at", 4, 8, "--die-at", 17))[0] == -signal.SIGKILL
    left = {path.name for path in tiny.config(method).directory(tmp_path).iterdir()}
    assert left == {records.NAME, "checkpoint.pt", "lock"}
    status, output = finish(worker(tmp_path, method, "--save-at", 4, 8))
    assert (status, output.split()[0]) == (0, "9")
    assert_same(whole, train(tiny.config(method), root=tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 4, 7])
def test_a_process_killed_at_any_moment_loses_nothing(lines, tmp_path):
    """It saves after every step, so that the blow may fall on a checkpoint that is being written."""
    whole = train(tiny.config("adam"), root=tmp_path / "whole")
    process = worker(tmp_path, "adam", "--save-at", *range(1, 21), "--pause", 0.02)
    for _ in range(lines):
        process.stdout.readline()
    process.kill()
    finish(process)
    assert_same(whole, train(tiny.config("adam"), root=tmp_path))
    assert [path.name for path in tiny.config("adam").directory(tmp_path).iterdir()] == [records.NAME]


@pytest.mark.slow
def test_a_run_that_is_being_trained_is_refused_in_one_sentence(tmp_path):
    process = worker(tmp_path, "sgdm", "--pause", 0.5)
    try:
        process.stdout.readline()
        with pytest.raises(
            UserError, match=rf"is being trained by another process \({process.pid} on .*\): wait for it"
        ):
            train(tiny.config(), root=tmp_path)
        assert train(tiny.config("adam"), root=tmp_path).finished
    finally:
        process.kill()
        finish(process)
    assert train(tiny.config(), root=tmp_path).finished
