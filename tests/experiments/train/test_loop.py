from __future__ import annotations

import math
import time

import pytest
import torch
from tests.experiments.train import tiny
from torch import nn

import apo
from apo_experiments.errors import UserError
from apo_experiments.method import Method
from apo_experiments.records import NAME
from apo_experiments.train import train
from apo_experiments.training import _derived_seed


class Notes:
    """A listener that remembers."""

    def __init__(self):
        self.calls, self.rows, self.messages = [], [], []

    def started(self, config, budget):
        self.calls.append("started")
        self.budget = budget

    def row(self, row):
        self.calls.append("row")
        self.rows.append(dict(row))

    def finished(self, record):
        self.calls.append("finished")

    def message(self, text):
        self.messages.append(text)


def without_clock(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def by_hand(config, steps):
    """Train without any of the loop's machinery and without evaluating; return the network and the losses."""
    torch.manual_seed(config.seed)
    problem = tiny.task(config.options, tiny.Setting(config.seed, torch.device("cpu"), None))
    stepper = tiny.METHODS[config.method].build(problem, config.hyper, tiny.Budget(steps, tiny.STEPS_PER_EPOCH))
    torch.manual_seed(_derived_seed(config.seed))
    losses = [float(stepper.step(*problem.batches.next())) for _ in range(steps)]
    return problem.model, losses


@pytest.mark.parametrize("method", tiny.NAMES)
def test_the_rows_hold_the_mean_losses_of_the_plainest_loop(method, tmp_path):
    """Evaluation switches modes, moves buffers, fills gradients and draws numbers: training must not notice."""
    config = tiny.config(method)
    record = train(config, root=tmp_path)
    _, losses = by_hand(config, 20)
    epochs = [losses[start : start + 5] for start in range(0, 20, 5)]
    assert [row["train_loss"] for row in record.rows] == pytest.approx([math.fsum(e) / 5 for e in epochs], rel=1e-14)
    assert [(row["step"], row["epoch"]) for row in record.rows] == [(5, 1.0), (10, 2.0), (15, 3.0), (20, 4.0)]


@pytest.mark.parametrize("epochs", [1, 4])
def test_the_metrics_are_those_of_the_weights_at_the_end_of_the_epoch(epochs, tmp_path):
    config = tiny.config("adam", epochs=epochs)
    record = train(config, root=tmp_path)
    model, _ = by_hand(config, 5 * epochs)
    assert record.rows[-1]["test_loss"] == tiny.evaluate(model)["test_loss"]
    assert set(record.rows[-1]) == {"kind", "step", "epoch", "train_loss", "rate", "test_loss", "seconds"}


def test_a_seed_decides_everything(tmp_path):
    first = train(tiny.config("adam"), root=tmp_path / "a")
    torch.manual_seed(1234)
    again = train(tiny.config("adam"), root=tmp_path / "b")
    other = train(tiny.config("adam", seed=4), root=tmp_path / "a")
    assert without_clock(first.rows) == without_clock(again.rows)
    assert first.rows[0]["train_loss"] != other.rows[0]["train_loss"]


def test_dropout_does_not_depend_on_what_building_the_optimizer_drew(tmp_path, registries):
    def wasteful(problem, hyper, budget):
        torch.rand(7)
        return tiny.METHODS["sgdm"].build(problem, hyper, budget)

    plain = train(tiny.config("sgdm"), root=tmp_path / "a")
    registries.methods["sgdm"] = Method("sgdm", "", wasteful)
    assert without_clock(train(tiny.config("sgdm"), root=tmp_path / "b").rows) == without_clock(plain.rows)


def test_a_finished_run_is_not_trained_again(tmp_path, registries):
    config, notes = tiny.config(), Notes()
    record = train(config, root=tmp_path)
    registries.recipes.clear()
    assert train(config, root=tmp_path, listener=notes) == record
    assert notes.calls == ["finished"]
    assert [path.name for path in config.directory(tmp_path).iterdir()] == [NAME]


def test_the_device_is_no_part_of_the_identity(tmp_path, registries):
    record = train(tiny.config(), root=tmp_path)
    assert train(tiny.config(device="cuda"), root=tmp_path) == record


def test_the_summary_has_the_last_and_the_best_row(tmp_path, registries):
    values = iter([3.0, 1.0, 2.0, 4.0])

    def task(options, setting):
        problem = tiny.task(options, setting)
        return tiny.Problem(problem.model, problem.loss, problem.batches, lambda model: {"score": next(values)})

    registries.recipes["tiny"] = tiny.recipe(task=task, metric="score", goal="min")
    summary = train(tiny.config(), root=tmp_path).summary
    assert summary["metrics"]["score"] == 4.0
    assert (summary["best"]["score"], summary["best"]["step"]) == (1.0, 10)
    assert (summary["steps"], summary["diverged"]) == (20, False)
    assert summary["metrics"].keys() == {"train_loss", "rate", "score"}

    values = iter([3.0, 1.0, 2.0, 4.0])
    registries.recipes["tiny"] = tiny.recipe(task=task, metric="score", goal="max")
    assert train(tiny.config(seed=9), root=tmp_path).summary["best"]["score"] == 4.0


def test_the_listener_hears_of_every_epoch_and_of_long_ones_in_between(tmp_path):
    notes = Notes()
    record = train(tiny.config(), root=tmp_path, listener=notes, row_seconds=0)
    assert notes.calls == ["started", *["row"] * 20, "finished"]
    assert notes.budget == tiny.Budget(20, 5)
    assert [row["epoch"] for row in notes.rows[:5]] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert "test_loss" not in notes.rows[0] and "test_loss" in notes.rows[4]
    # what the watcher hears in between depends on the machine's speed, so it is not in the record
    assert [row["step"] for row in record.rows] == [5, 10, 15, 20]


def test_telemetry_is_in_the_rows(tmp_path):
    assert train(tiny.config("apo-rate"), root=tmp_path).rows[0]["fsd"] > 0


def test_the_clock_leaves_evaluation_out(tmp_path, registries, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Slow(tiny.PlainStepper):
        def step(self, inputs, target):
            now[0] += 1
            return super().step(inputs, target)

    def task(options, setting):
        problem = tiny.task(options, setting)

        def evaluate(model):
            now[0] += 1000
            return {"test_loss": 0.0}

        return tiny.Problem(problem.model, problem.loss, problem.batches, evaluate)

    registries.recipes["tiny"] = tiny.recipe(task=task)
    registries.methods["sgdm"] = Method(
        "sgdm", "", lambda problem, hyper, budget: Slow(problem, torch.optim.SGD(problem.model.parameters(), lr=0.1))
    )
    record = train(tiny.config(), root=tmp_path)
    assert [row["seconds"] for row in record.rows] == [5, 10, 15, 20]
    assert record.summary["seconds"] == 20


class Exploding(tiny.PlainStepper):
    """Returns an infinite loss from a step on, or raises."""

    def __init__(self, problem, at, error=None):
        super().__init__(problem, torch.optim.SGD(problem.model.parameters(), lr=0.01))
        self.at, self.error, self.count = at, error, 0

    def step(self, inputs, target):
        self.count += 1
        loss = super().step(inputs, target)
        if self.count < self.at:
            return loss
        if self.error:
            raise self.error
        return loss * math.inf


@pytest.mark.parametrize("error", [None, apo.NonFiniteError("the loss is nan"), torch.linalg.LinAlgError("singular")])
def test_a_run_that_diverges_ends_with_a_record_that_says_so(error, tmp_path, registries):
    registries.methods["sgdm"] = Method("sgdm", "", lambda problem, hyper, budget: Exploding(problem, 8, error))
    notes = Notes()
    record = train(tiny.config(), root=tmp_path, listener=notes)
    assert record.summary["diverged"] is True
    assert record.summary["metrics"]["test_loss"] is None and record.summary["metrics"]["train_loss"] is None
    assert [row["step"] for row in record.rows] == [5]
    assert record.summary["best"]["step"] == 5
    assert notes.calls[-1] == "finished" and "diverged" in notes.messages[-1]
    assert train(tiny.config(), root=tmp_path) == record


def test_a_run_that_diverges_in_its_first_epoch_has_its_metric_all_the_same(tmp_path, registries):
    registries.methods["sgdm"] = Method("sgdm", "", lambda problem, hyper, budget: Exploding(problem, 1))
    summary = train(tiny.config(), root=tmp_path).summary
    assert (summary["diverged"], summary["metrics"], summary["best"]) == (
        True,
        {"test_loss": None},
        {"test_loss": None},
    )


def test_a_metric_that_is_not_a_number_is_a_divergence(tmp_path, registries):
    def task(options, setting):
        problem = tiny.task(options, setting)
        return tiny.Problem(problem.model, problem.loss, problem.batches, lambda model: {"test_loss": math.nan})

    registries.recipes["tiny"] = tiny.recipe(task=task)
    record = train(tiny.config(), root=tmp_path)
    assert record.summary["diverged"] and record.rows[0]["test_loss"] is None and len(record.rows) == 1


def test_other_errors_are_not_mistaken_for_divergence(tmp_path, registries):
    registries.methods["sgdm"] = Method(
        "sgdm", "", lambda problem, hyper, budget: Exploding(problem, 2, RuntimeError("a bug"))
    )
    with pytest.raises(RuntimeError, match="a bug"):
        train(tiny.config(), root=tmp_path)


def test_a_recipe_whose_metric_nobody_reports_is_named(tmp_path, registries):
    registries.recipes["tiny"] = tiny.recipe(metric="accuracy")
    with pytest.raises(ValueError, match="recipe 'tiny' shows the metric 'accuracy', but its task reports only"):
        train(tiny.config(), root=tmp_path)


def test_a_costly_metric_may_come_at_the_end_alone(tmp_path, registries):
    values = iter([{"bleu": None}, {}, {}, {"bleu": 30.0}])

    def task(options, setting):
        problem = tiny.task(options, setting)
        return tiny.Problem(problem.model, problem.loss, problem.batches, lambda model: next(values))

    registries.recipes["tiny"] = tiny.recipe(task=task, metric="bleu", goal="max")
    record = train(tiny.config(), root=tmp_path)
    assert ["bleu" in row for row in record.rows] == [False, False, False, True]
    assert record.summary["metrics"]["bleu"] == record.summary["best"]["bleu"] == 30.0


def test_a_recipe_that_computes_gets_a_record_too(tmp_path, registries):
    def compute(options, setting, hyper):
        rows = [{"x": [0.0, 1.0], "value": torch.tensor(float(n))} for n in range(3)]
        return rows, {"error": hyper["lr"] * setting.seed}

    registries.recipes["tiny"] = tiny.recipe(task=None, compute=compute, metric="error")
    notes = Notes()
    record = train(tiny.config(method="exact", hyper={"lr": 0.5}), root=tmp_path, listener=notes)
    assert record.rows == [{"kind": "row", "step": n, "x": [0.0, 1.0], "value": float(n)} for n in range(3)]
    assert record.summary["metrics"] == record.summary["best"] == {"error": 1.5}
    assert notes.calls == ["started", "finished"]
    registries.recipes.clear()
    assert train(tiny.config(method="exact", hyper={"lr": 0.5}), root=tmp_path) == record


def test_a_computation_without_a_finite_result_is_a_divergence(tmp_path, registries):
    registries.recipes["tiny"] = tiny.recipe(task=None, compute=lambda *_: ([], {"error": math.inf}), metric="error")
    summary = train(tiny.config(), root=tmp_path).summary
    assert summary["diverged"] and summary["metrics"] == {"error": None}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"recipe": "nope"}, "there is no recipe 'nope': choose one of tiny"),
        ({"method": "nope"}, "there is no method 'nope': choose one of adam"),
        ({"device": "abacus"}, "the device 'abacus' is unknown: use cpu or cuda"),
        ({"epochs": 0}, "epochs was 0: it must be at least 1"),
        ({"hyper": {"lr": -1.0}}, r"sgdm of tiny cannot be built .*Invalid learning rate: -1.0\): choose other values"),
        ({"hyper": {"lr": "much"}}, r"sgdm of tiny cannot be built .*TypeError"),
    ],
)
def test_a_wrong_run_is_refused_in_one_sentence_and_leaves_nothing(changes, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        train(tiny.config(**changes), root=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_named(tmp_path):
    with pytest.raises(UserError, match="'cuda' is not available, since torch finds no CUDA"):
        train(tiny.config(device="cuda"), root=tmp_path)


def test_an_epoch_without_steps_is_refused_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny.ShuffledRows, "steps_per_epoch", 0)
    with pytest.raises(UserError, match="an epoch has no steps"):
        train(tiny.config(), root=tmp_path)


def test_missing_data_leaves_no_trace_of_the_run(tmp_path, registries):
    def task(options, setting):
        raise UserError("the data are missing")

    registries.recipes["tiny"] = tiny.recipe(task=task)
    with pytest.raises(UserError, match="missing"):
        train(tiny.config(), root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_a_module_is_left_alone_by_evaluation(tmp_path, registries):
    criterion = nn.CrossEntropyLoss()

    def task(options, setting):
        problem = tiny.task(options, setting)
        return tiny.Problem(
            problem.model, criterion, problem.batches, lambda model: {"test_loss": float(criterion.eval() is None)}
        )

    registries.recipes["tiny"] = tiny.recipe(task=task)
    train(tiny.config(), root=tmp_path)
    assert criterion.training


@pytest.mark.gpu
def test_no_step_waits_for_the_gpu(tmp_path, registries):
    """Torch raises an error wherever the host waits for the device, except at the end of an epoch."""

    class Watched(tiny.ShuffledRows):
        def __init__(self, seed, device):
            super().__init__(seed, device)
            self.batch = super().next()
            self.count = 0

        def next(self):
            # on from the first step of an epoch until the last one has been issued
            torch.cuda.set_sync_debug_mode("error" if self.count % 5 != 4 else "default")
            self.count += 1
            return self.batch

    def task(options, setting):
        problem = tiny.task(options, setting)
        return tiny.Problem(problem.model, problem.loss, Watched(setting.seed, setting.device), problem.evaluate)

    registries.recipes["tiny"] = tiny.recipe(task=task)
    try:
        assert not train(tiny.config(device="cuda"), root=tmp_path).summary["diverged"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
