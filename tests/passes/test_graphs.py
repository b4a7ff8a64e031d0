"""CUDA graphs in place of a network: the same outputs, gradients and statistics, and the same training run."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import apo
from apo.passes import graphs as graphed_network
from apo.passes.graphs import GraphedNetwork

LOSS = nn.functional.cross_entropy


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(dropout), nn.Flatten(), nn.Linear(144, 5)]
    return nn.Sequential(*layers)


def batches(count: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(16, 3, 8, 8, generator=generator) for _ in range(count)]
    return [(x.to(device), torch.randint(5, (16,), generator=generator).to(device)) for x in images]


def explicit(model: nn.Module, optimizer: torch.optim.Optimizer, data: list, **options) -> apo.Tuner:
    tuner = apo.APO(optimizer, model, LOSS, interval=2, **options)
    for x, y in data:
        tuner.step(x, y)
    return tuner


def attached(model: nn.Module, optimizer: torch.optim.Optimizer, data: list, **options) -> apo.Tuner:
    criterion = nn.CrossEntropyLoss()
    tuner = apo.attach(optimizer, model, criterion, interval=2, **options)
    for x, y in data:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return tuner


def trained(run, device: str, rule: str, dropout: float = 0.0, **options) -> tuple[nn.Module, apo.Tuner]:
    model = network(dropout).to(device)
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) if rule == "rate" else apo.Kronecker(model, lr=0.1)
    )
    torch.manual_seed(2)
    return model, run(model, optimizer, batches(24, device), **options)


@pytest.mark.parametrize("run", [explicit, attached])
@pytest.mark.parametrize("rule", ["rate", "kronecker"])
def test_without_cuda_graphs_change_nothing(run, rule):
    model, tuner = trained(run, "cpu", rule, dropout=0.5)
    twin, other = trained(run, "cpu", rule, dropout=0.5, cuda_graph=True)
    assert [record.objective for record in other.history] == [record.objective for record in tuner.history]
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))


def test_a_tuner_with_graphs_can_be_copied():
    model = network()
    tuner = explicit(model, torch.optim.SGD(model.parameters(), lr=0.01), batches(3, "cpu"), cuda_graph=True)
    twin = copy.deepcopy(tuner)
    (x, y), *_ = batches(1, "cpu")
    assert torch.equal(tuner.step(x, y), twin.step(x, y))
    assert twin.engine._graphed.network is twin.model


def test_cuda_graph_is_yes_or_no():
    model = network()
    with pytest.raises(TypeError, match="cuda_graph must be True or False, got 'yes'"):
        apo.APO(torch.optim.SGD(model.parameters(), lr=0.1), model, LOSS, cuda_graph="yes")


class Replayable:
    """Graphs for a machine without CUDA: a replay runs the network into memory that the next one overwrites."""

    def __init__(self, network: nn.Module, inputs: torch.Tensor, parameters: list[nn.Parameter]) -> None:
        self.network, self.parameters, self.inputs = network, parameters, inputs.detach().clone()
        self.passes = 0
        self.forward, self.backward = SimpleNamespace(replay=self._forward), SimpleNamespace(replay=self._backward)
        self.output = self.cotangent = torch.zeros(16, 5)
        self.gradients: list[torch.Tensor] = [torch.zeros_like(p) for p in parameters]

    def _forward(self) -> None:
        with torch.enable_grad():
            self._graph = self.network(self.inputs)
        self.output = self._graph.detach()

    def _backward(self) -> None:
        found = torch.autograd.grad(self._graph, self.parameters, self.cotangent)
        for own, gradient in zip(self.gradients, found, strict=True):
            own.copy_(gradient)


@pytest.mark.parametrize("total_steps", [None, 24])  # with it, a loss is taken on the other batch as well
@pytest.mark.parametrize("run", [explicit, attached])
@pytest.mark.parametrize("rule", ["rate", "kronecker"])
def test_replayed_passes_make_the_same_meta_steps(run, rule, total_steps, monkeypatch):
    model, tuner = trained(run, "cpu", rule, total_steps=total_steps)
    monkeypatch.setattr(graphed_network, "_Graphs", Replayable)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(graphed_network, "_is_plain_batch", lambda args: True)
    twin, other = trained(run, "cpu", rule, cuda_graph=True, total_steps=total_steps)
    assert other.engine._graphed._graphs.passes > 20  # type: ignore[union-attr]
    assert [record.objective for record in other.history] == [record.objective for record in tuner.history]
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("total_steps", [None, 24])
@pytest.mark.parametrize("run", [explicit, attached])
@pytest.mark.parametrize("rule", ["rate", "kronecker"])
def test_graphs_give_the_run_without_them(run, rule, total_steps):
    model, tuner = trained(run, "cuda", rule, total_steps=total_steps)
    twin, other = trained(run, "cuda", rule, cuda_graph=True, total_steps=total_steps)
    assert other.engine._graphed._graphs is not None  # type: ignore[union-attr]
    for record, expected in zip(other.history, tuner.history, strict=True):
        assert record.objective == pytest.approx(expected.objective, rel=1e-3)
    for one, other_value in zip(twin.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other_value, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_a_network_with_dropout_runs_as_it_does_without_graphs():
    _, tuner = trained(explicit, "cuda", "rate", dropout=0.5)
    _, other = trained(explicit, "cuda", "rate", dropout=0.5, cuda_graph=True)
    assert other.engine._graphed._graphs is None  # type: ignore[union-attr]
    assert [record.objective for record in other.history] == pytest.approx(
        [record.objective for record in tuner.history], rel=1e-3
    )


@pytest.mark.gpu
def test_graphs_are_captured_anew_where_weights_have_moved_or_a_layer_has_changed_its_mode():
    model = network().cuda()
    graphed = GraphedNetwork(model)
    (x, _), *_ = batches(1, "cuda")

    def passes(count: int) -> torch.Tensor:
        for _ in range(count):
            model.zero_grad()
            output = graphed(x)
            output.sum().backward()
        return output

    passes(5)
    assert graphed._graphs is not None
    first = graphed._graphs
    with torch.no_grad():
        model[5].weight.data = model[5].weight * 2  # elsewhere in memory
    torch.testing.assert_close(passes(1), model(x))
    assert graphed._graphs is None
    passes(4)
    assert graphed._graphs is not None and graphed._graphs is not first
    model[1].eval()
    torch.testing.assert_close(passes(1), model(x))


@pytest.mark.gpu
def test_graphed_network_gives_the_outputs_gradients_and_statistics_of_the_network():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).cuda()
    plain, graphed = copy.deepcopy(network), GraphedNetwork(network)
    for index in range(8):
        inputs, weight = torch.randn(16, 3, 8, 8, device="cuda"), torch.randn(16, 2, device="cuda")
        for model in (plain, graphed):
            model.zero_grad()
            with torch.no_grad():
                model(inputs.flip(0))
            for batch in (inputs, inputs.flip(1)):  # gradients of two passes add up
                (model(batch) * weight).sum().backward()
        assert (graphed._graphs is not None) == (index >= 1)
        for one, other in zip(graphed.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3)
        for one, other in zip(graphed.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_graphs_are_captured_while_an_older_pass_is_alive_and_hooks_on_gradients_act_once():
    model, seen = network().cuda(), []
    twin, graphed = copy.deepcopy(model), GraphedNetwork(model)
    model[5].weight.register_hook(lambda gradient: seen.append(1))
    (x, _), *_ = batches(1, "cuda")
    alive = model(x).sum()
    for _ in range(5):
        graphed(x).sum().backward()
        twin(x).sum().backward()
    assert graphed._graphs is not None and len(seen) == 5
    alive.backward()
    twin(x).sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_graphed_network_refuses_a_backward_pass_whose_activations_are_gone():
    graphed = GraphedNetwork(nn.Linear(8, 4).cuda())
    inputs = torch.randn(3, 8, device="cuda")
    for _ in range(4):
        graphed(inputs).sum().backward()
    first, second = graphed(inputs), graphed(inputs)
    second.sum().backward()
    with pytest.raises(RuntimeError, match="before it"):
        first.sum().backward()
