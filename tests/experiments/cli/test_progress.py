"""What is shown while runs go on."""

from __future__ import annotations

import io

import pytest

from apo_experiments.crowd import CrowdProgress
from apo_experiments.problem import Budget
from apo_experiments.progress import LiveProgress, PlainProgress, display
from apo_experiments.records import Record
from apo_experiments.runs import RunConfig

CONFIG = RunConfig("little-mlp", "SGD", "sgd", "smoke", seed=3, epochs=4)
FINISHED = Record(CONFIG, {}, [], {"metrics": {"test_loss": 0.5}, "seconds": 75.0, "diverged": False})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def rows(*steps: int) -> list[dict]:
    return [{"step": step, "train_loss": 0.25, "rate": 0.1, "seconds": step / 10} for step in steps]


def test_a_terminal_gets_the_live_display_and_a_log_gets_lines(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(display(1, {}, Terminal()), LiveProgress)
    assert isinstance(display(1, {}, io.StringIO()), PlainProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(display(1, {}, Terminal()), PlainProgress)


def test_without_rich_a_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert isinstance(display(1, {}, Terminal()), PlainProgress)


def test_lines_come_at_most_every_few_seconds_and_the_result_always():
    stream = io.StringIO()
    with PlainProgress(2, {"little-mlp": "test_loss"}, stream, every_seconds=60) as shown:
        shown.started(CONFIG, Budget(40, 10))
        for row in rows(10, 20, 30, 40):
            shown.row(row)
        shown.finished(FINISHED)
    assert stream.getvalue().splitlines() == [
        "[1/2] little-mlp SGD seed 3: started, 4 epochs of 10 steps",
        "[1/2] little-mlp SGD seed 3: epoch 1/4, loss 0.25, rate 0.1, 3 s left",
        "[1/2] little-mlp SGD seed 3: test_loss 0.5000 in 1 min 15 s",
    ]


def test_a_run_that_was_finished_before_and_one_that_diverged_say_so():
    stream = io.StringIO()
    with PlainProgress(2, {"little-mlp": "test_loss"}, stream) as shown:
        shown.finished(FINISHED)
        shown.started(CONFIG, Budget(40, 10))
        shown.finished(Record(CONFIG, {}, [], {"metrics": {"test_loss": None}, "seconds": 1.0, "diverged": True}))
    first, _, last = stream.getvalue().splitlines()
    assert first == "[1/2] little-mlp SGD seed 3: test_loss 0.5000 (finished before)"
    assert last == "[2/2] little-mlp SGD seed 3: diverged in 1 s"


def test_a_sweep_numbers_its_runs_without_knowing_how_many_there_are():
    stream = io.StringIO()
    with PlainProgress(None, {"little-mlp": "test_loss"}, stream) as shown:
        shown.finished(FINISHED)
    assert stream.getvalue() == "[1] little-mlp SGD seed 3: test_loss 0.5000 in 1 min 15 s\n"


def test_a_display_that_nobody_reads_any_more_does_not_stop_the_runs():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

    with PlainProgress(1, {}, Closed()) as shown, CrowdProgress(1, {}, Closed()) as crowd:
        shown.started(CONFIG, Budget(40, 10))
        shown.finished(FINISHED)
        crowd.message("1 of 2 runs are finished")


def test_a_missing_loss_does_not_break_a_line():
    stream = io.StringIO()
    with PlainProgress(1, {}, stream) as shown:
        shown.started(CONFIG, Budget(40, 10))
        shown.row({"step": 15, "train_loss": None, "rate": 0.1, "seconds": 1.5})
    assert "epoch 1.5/4, rate 0.1" in stream.getvalue()


def test_live_display_shows_the_run_and_keeps_results_and_messages(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    terminal = Terminal()
    with LiveProgress(1, {"little-mlp": "test_loss"}, terminal) as shown:
        shown.started(CONFIG, Budget(40, 10))
        for row in rows(10, 20):
            shown.row(row)
        shown._progress.refresh()
        shown.message("[a message] with brackets")
        shown.finished(FINISHED)
    text = terminal.getvalue()
    assert "loss 0.25  rate 0.1" in text and "epoch 2/4" in text
    assert "[a message] with brackets" in text
    assert "test_loss 0.5000 in 1 min 15 s" in text
