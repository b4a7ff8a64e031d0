"""Passes that run outside the tuner leave the same run behind: hand-made ones, and CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.experiments.methods.conformance import Cycle, build, classification, take_steps
from torch import nn

import apo
from apo_experiments.methods import tuned
from apo_experiments.methods.passes import EagerPass, GraphedPass
from apo_experiments.problem import Problem
from apo_experiments.training import CompiledNetwork

TUNED = ["sgd-apo", "sgdm-apo", "rmsprop-apo", "adam-apo", "adamw-apo", "apo-precond", "apo-eigen", "apo-rate-momentum"]


class Elsewhere:
    """A pass of which the tuner knows nothing."""

    def __init__(self, problem: Problem, hyper: object) -> None:
        self.run = EagerPass(problem.model, problem.loss)
        self.calls = 0

    def __call__(self, inputs, target):
        self.calls += 1
        return self.run(inputs, target)


@pytest.mark.parametrize("name", TUNED)
@pytest.mark.parametrize("interval", [1, 4])
def test_ordinary_steps_run_elsewhere_give_the_same_run(name, interval, monkeypatch):
    task = classification()
    stepper = build(name, task, {"interval": interval, "lr": 0.01})
    expected = take_steps(stepper, task, 21)
    monkeypatch.setattr(tuned, "training_pass", Elsewhere)
    twin_task = classification()
    twin = build(name, twin_task, {"interval": interval, "lr": 0.01})
    found = take_steps(twin, twin_task, 21)
    assert twin._pass.calls == (0 if interval == 1 else 15)  # type: ignore[attr-defined]
    assert [loss.item() for loss in found] == [loss.item() for loss in expected]
    pairs = zip(task.model.parameters(), twin_task.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert twin.rate() == stepper.rate()


def test_recorded_batch_is_the_previous_batch_of_the_next_meta_step():
    torch.manual_seed(0)
    batches = [(torch.randn(6, 3), torch.randn(6, 2)) for _ in range(9)]

    def run(by_hand: bool) -> list[float]:
        torch.manual_seed(1)
        model = nn.Linear(3, 2)
        tuner = apo.APO(
            torch.optim.SGD(model.parameters(), lr=0.01), model, nn.functional.mse_loss, interval=4, fsd_weight=5.0
        )
        for inputs, target in batches:
            if by_hand and not tuner.is_meta_step():
                tuner.optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), target).backward()
                tuner.record(inputs, target)
                tuner.step()
            else:
                tuner.step(inputs, target)
        assert tuner.steps == 9
        return [record.fsd for record in tuner.history]

    assert run(by_hand=True) == run(by_hand=False)


def test_recording_a_meta_step_is_refused():
    model = nn.Linear(3, 2)
    tuner = apo.APO(torch.optim.SGD(model.parameters(), lr=0.01), model, nn.functional.mse_loss)
    with pytest.raises(apo.ReplayError, match="call backward"):
        tuner.record(torch.randn(6, 3), torch.randn(6, 2))


def test_without_cuda_a_graphed_pass_is_an_eager_one():
    task, twin = classification(), classification()
    eager, graphed = EagerPass(task.model, task.loss), GraphedPass(twin.model, twin.loss)
    for step in range(5):
        torch.manual_seed(step)
        expected = eager(*task.batches.next())
        torch.manual_seed(step)
        assert torch.equal(graphed(*twin.batches.next()), expected)
    pairs = zip(task.model.parameters(), twin.model.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]


def without_dropout(task: Problem) -> Problem:
    for module in task.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return task


@pytest.mark.parametrize("name", ["sgdm", "kfac", "sgdm-apo", "apo-precond"])
def test_compiled_network_gives_the_run_of_the_network(name):
    task, twin = without_dropout(classification()), without_dropout(classification())
    twin = replace(twin, trained_as=CompiledNetwork(twin.model, backend="aot_eager"))
    expected = take_steps(build(name, task, {"interval": 4} if "apo" in name else {}), task, 13)
    found = take_steps(build(name, twin, {"interval": 4} if "apo" in name else {}), twin, 13)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-4, atol=1e-5)
    for one, other in zip(twin.model.buffers(), task.model.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_compiled_network_is_the_network_itself_in_evaluation():
    network = without_dropout(classification()).model
    compiled = CompiledNetwork(network, backend="aot_eager").eval()
    compiled._compiled = None  # type: ignore[assignment]
    inputs = torch.randn(5, 1, 8, 8)
    assert torch.equal(compiled(inputs), network(inputs))


def on_cuda(dropout: bool) -> Problem:
    task = classification()
    batches = [(x.cuda(), y.cuda()) for x, y in task.batches._batches]  # type: ignore[attr-defined]
    if not dropout:
        without_dropout(task)
    return Problem(task.model.cuda(), task.loss, Cycle(batches), task.evaluate)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sgdm", "adam", "rmsprop", "kfac", "sgdm-apo", "adam-apo", "apo-precond"])
@pytest.mark.parametrize("precision", ["float32", "bf16-autocast"])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_cuda_graph_gives_the_eager_run(name, precision, compiled):
    runs = []
    for graph in (False, True):
        task = on_cuda(dropout=False)
        if graph and compiled:
            task = replace(task, trained_as=CompiledNetwork(task.model))
        stepper = build(name, task, {"cuda_graph": graph, "lr": 0.01, "precision": precision})
        runs.append(torch.stack(take_steps(stepper, task, 40)).cpu())
        if graph:
            assert stepper._pass._graph is not None  # type: ignore[attr-defined]
            if hasattr(stepper, "tuner"):
                assert stepper.tuner.model._graphs is not None  # type: ignore[attr-defined]
    tolerance = 1e-3 if precision == "float32" else 5e-2
    torch.testing.assert_close(runs[1], runs[0], rtol=tolerance, atol=tolerance)
    assert runs[1][-4:].mean() < runs[1][:4].mean()


@pytest.mark.gpu
def test_a_network_that_draws_random_numbers_runs_eagerly():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda()
    run = GraphedPass(model, lambda output, target: output.square().mean())
    inputs, target = torch.randn(32, 64, device="cuda"), torch.zeros(1, device="cuda")
    losses = [run(inputs, target).item() for _ in range(12)]
    assert run._graph is None
    assert len(set(losses)) == 12


@pytest.mark.gpu
def test_batches_of_another_shape_run_eagerly_beside_the_graph():
    model = nn.Linear(8, 4).cuda()
    run, eager = GraphedPass(model, nn.functional.cross_entropy), EagerPass(model, nn.functional.cross_entropy)
    for size in (16, 16, 16, 16, 5, 16, 5):
        inputs, target = torch.randn(size, 8, device="cuda"), torch.randint(4, (size,), device="cuda")
        loss = run(inputs, target)
        gradients = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        torch.testing.assert_close(loss, eager(inputs, target))
        for gradient, p in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, p.grad)


@pytest.mark.gpu
def test_loss_that_asks_the_host_falls_back_to_eager_passes_with_a_warning():
    def loss(output, target):
        assert output.sum().item() < float("inf")
        return output.square().mean()

    model = nn.Linear(8, 4).cuda()
    run = GraphedPass(model, loss)
    inputs, target = torch.randn(3, 8, device="cuda"), torch.zeros(1, device="cuda")
    with pytest.warns(UserWarning, match="runs eagerly"):
        losses = [run(inputs, target).item() for _ in range(6)]
    assert len(set(losses)) == 1
    assert torch.randn(3, device="cuda").isfinite().all()  # the random stream does not wait for the recording's end
