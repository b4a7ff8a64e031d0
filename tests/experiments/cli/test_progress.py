"""What is shown during runs."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from tests.experiments.cli import registry

from apo_experiments import progress
from apo_experiments.problem import Budget
from apo_experiments.progress import Progress, duration
from apo_experiments.recipe import Scale
from apo_experiments.records import Record
from apo_experiments.runs import RunConfig

RECIPE = registry.RECIPES["little-mlp"]
CONFIG = RunConfig("little-mlp", "SGD", "sgd", "smoke", seed=3, epochs=4)
FINISHED = Record(CONFIG, {}, [], {"metrics": {"test_loss": 0.5}, "seconds": 75.0, "diverged": False})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    return Terminal()


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def seeds(*numbers: int) -> list[RunConfig]:
    return [replace(CONFIG, seed=number) for number in numbers]


def rows(*steps: int) -> list[dict]:
    return [{"step": step, "train_loss": 0.25, "rate": 0.1, "seconds": step / 10} for step in steps]


def test_a_terminal_gets_bars_and_a_log_gets_lines(terminal, monkeypatch):
    assert Progress([RECIPE], terminal).bars is not None
    assert Progress([RECIPE], io.StringIO()).bars is None
    monkeypatch.setenv("TERM", "dumb")
    assert Progress([RECIPE], terminal).bars is None


def test_lines_come_at_most_every_few_seconds_and_the_result_always():
    stream = io.StringIO()
    with Progress([RECIPE], stream, every_seconds=60) as shown:
        lane = shown.lane()
        shown.expect([CONFIG])
        lane.started(CONFIG, Budget(40, 10))
        for row in rows(10, 20, 30, 40):
            lane.row(row)
        lane.finished(FINISHED)
    assert stream.getvalue().splitlines() == [
        "[1/1] little-mlp SGD seed 3: started, 4 epochs of 10 steps",
        "[1/1] little-mlp SGD seed 3: epoch 1/4, loss 0.25, rate 0.1, 3 s left",
        "[1/1] little-mlp SGD seed 3: test_loss 0.5000 in 1 min 15 s",
    ]


def test_a_run_that_was_finished_before_and_one_that_diverged_say_so():
    stream = io.StringIO()
    with Progress([RECIPE], stream) as shown:
        lane = shown.lane()
        shown.expect(seeds(4), finished=1)
        lane.finished(FINISHED)
        lane.started(*seeds(4), Budget(40, 10))
        lane.finished(Record(*seeds(4), {}, [], {"metrics": {"test_loss": None}, "seconds": 1.0, "diverged": True}))
    first, _, last = stream.getvalue().splitlines()
    assert first == "[1/2] little-mlp SGD seed 3: test_loss 0.5000 (finished before)"
    assert last == "[2/2] little-mlp SGD seed 4: diverged in 1 s"


def test_the_estimate_for_all_runs_starts_with_the_recipe_and_learns_from_the_runs(clock):
    # By the recipe, two methods with one seed and two epochs take 3 s: with four epochs, 3 s a run.
    shown = Progress([RECIPE], io.StringIO())
    lane = shown.lane()
    shown.expect(seeds(3, 4, 5))
    assert shown.left() == pytest.approx(9)
    shown.expect(seeds(3, 4, 5), jobs=3)
    assert shown.left() == pytest.approx(3)
    shown.expect(seeds(3, 4, 5))
    lane.started(CONFIG, Budget(40, 10))
    lane.row({"step": 10, "seconds": 15.0})  # one run takes 60 s
    assert shown.left() == pytest.approx(45 + 120)
    clock[0] += 60
    lane.finished(FINISHED)
    assert shown.left() == pytest.approx(120)
    first, second = shown.lane(), shown.lane()
    for lane, config in zip((first, second), seeds(4, 5), strict=True):
        lane.started(config, Budget(40, 10))
        lane.row({"step": 20, "seconds": 30.0})
    assert shown.left() == pytest.approx(30)  # both at a time


def test_lines_of_several_runs_end_with_the_time_that_all_of_them_need():
    stream = io.StringIO()
    with Progress([RECIPE], stream) as shown:
        lane = shown.lane()
        shown.expect(seeds(3, 4))
        lane.started(CONFIG, Budget(40, 10))
        lane.row({"step": 10, "seconds": 15.0})
    assert stream.getvalue().endswith("epoch 1/4, 45 s left (all runs: 1 min 45 s)\n")


@pytest.mark.parametrize(
    ("minutes", "jobs", "device", "words"),
    [
        (10_000, 1, "cuda", "6 d 22 h on one GPU (1 run)"),
        (10_000, 9, "cuda", None),
        (120, 1, "cuda", None),
        (120, 1, "cpu", "2 h 0 min on one GPU, and many times as long on a CPU as here (1 run)"),
    ],
)
def test_runs_that_take_days_are_announced_before_they_begin(minutes, jobs, device, words):
    stream = io.StringIO()
    recipe = replace(RECIPE, entries=RECIPE.entries[:1], scales={"paper": Scale(4, 1, minutes)})
    Progress([recipe], stream).expect([replace(CONFIG, scale="paper", device=device)], jobs)
    assert (words is None and not stream.getvalue()) or f"This will take about {words}." in stream.getvalue()
    assert stream.getvalue().count("\n") == (words is not None)


def test_runs_that_turn_out_to_take_days_are_announced_once():
    stream = io.StringIO()
    shown = Progress([RECIPE], stream, every_seconds=60)
    lane = shown.lane()
    shown.expect(seeds(3, 4))
    lane.started(CONFIG, Budget(40, 10))
    for _ in range(2):
        lane.row({"step": 10, "seconds": 86_400.0})
    assert stream.getvalue().count("At this pace all runs take another 7 d 0 h. Ctrl-C stops it") == 1


def test_a_display_that_nobody_reads_any_more_does_not_stop_the_runs():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

    with Progress([RECIPE], Closed()) as shown:
        lane = shown.lane()
        lane.started(CONFIG, Budget(40, 10))
        lane.finished(FINISHED)
        shown.lane().message("1 of 2 runs are finished")


def test_a_missing_loss_does_not_break_a_line():
    stream = io.StringIO()
    with Progress([RECIPE], stream) as shown:
        lane = shown.lane()
        lane.started(CONFIG, Budget(40, 10))
        lane.row({"step": 15, "train_loss": None, "rate": 0.1, "seconds": 1.5})
    assert "epoch 1.5/4, rate 0.1" in stream.getvalue()


def test_a_terminal_shows_one_bar_for_all_runs_and_one_for_each_that_is_at_work(terminal):
    with Progress([RECIPE], terminal) as shown:
        shown.expect(seeds(3, 4, 5))
        first, second = shown.lane(), shown.lane()
        for lane, config in zip((first, second), seeds(3, 4), strict=True):
            lane.started(config, Budget(40, 10))
            lane.row({"step": 20, "train_loss": 0.25, "rate": 0.1, "seconds": 30.0})
        assert [task.description for task in shown.bars.tasks] == [
            "all runs",
            "[1/3] little-mlp SGD seed 3",
            "[2/3] little-mlp SGD seed 4",
        ]
        whole = shown.bars.tasks[0]
        assert whole.completed / whole.total == pytest.approx(1 / 3)
        assert whole.fields["facts"] == f"0 of 3 done  {duration(60)} left"
        shown.bars.refresh()
        first.message("[a message] with brackets")
        first.finished(FINISHED)
        assert len(shown.bars.tasks) == 2
    text = terminal.getvalue()
    assert "loss 0.25  rate 0.1" in text and "epoch 2/4" in text
    assert "[1/3] little-mlp SGD seed 3: [a message] with brackets" in text
    assert "test_loss 0.5000 in 1 min 15 s" in text


def test_the_bar_of_a_run_whose_process_died_goes_away(terminal):
    with Progress([RECIPE], terminal) as shown:
        shown.expect(seeds(3, 4))
        for config in seeds(3, 4):
            shown.lane().started(config, Budget(40, 10))
        shown.failed(CONFIG)
        assert [task.description for task in shown.bars.tasks] == ["all runs", "[2/2] little-mlp SGD seed 4"]
        shown.lane().started(*seeds(4), Budget(40, 10))  # another worker of a sweep resumes it
        assert [task.description for task in shown.bars.tasks] == ["all runs", "[3/3] little-mlp SGD seed 4"]
