"""Stand-ins for the parameters of a network: the same numbers, and nothing of the parameters' past."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import parametrizations

from apo.passes.graphs import _gradients, fresh_leaves


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


class Hoarder(nn.Module):
    """Reads its weight past torch's register of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.kept = [self.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.kept[0]


NETWORKS = {
    "tied": Tied,
    "recurrent": Recurrent,
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "frozen": lambda: nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_fresh_leaves_have_the_values_and_gradients_of_the_parameters(name):
    torch.manual_seed(0)
    network, x = NETWORKS[name](), torch.randn(4, 3)
    parameters = [p for p in network.parameters() if p.requires_grad]
    expected = torch.autograd.grad(network(x).square().sum(), parameters)
    before = dict(network.named_parameters())
    with fresh_leaves(network) as leaves:
        assert all(leaves[p].data_ptr() == p.data_ptr() and leaves[p] is not p for p in before.values())
        output = network(x)
        found = _gradients(output, [leaves[p] for p in parameters], parameters, 2 * output.detach())
    torch.testing.assert_close(found, expected)
    after = dict(network.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)


def test_hooks_and_gradients_of_the_parameters_take_no_part():
    network, seen = nn.Linear(3, 1), []
    network.weight.register_hook(lambda gradient: seen.append(gradient))
    with fresh_leaves(network) as leaves:
        network(torch.ones(2, 3)).sum().backward()
        assert leaves and network.weight.grad is not None
    assert not seen and network.weight.grad is None


def test_parameters_come_back_after_an_error():
    network = nn.Linear(3, 1)
    weight = network.weight
    with pytest.raises(RuntimeError, match="mat1 and mat2"), fresh_leaves(network):
        network(torch.ones(2, 4))
    assert network.weight is weight


def test_a_network_that_reads_parameters_from_elsewhere_is_refused():
    network = Hoarder()
    with fresh_leaves(network) as leaves:
        output = network(torch.ones(2, 3))
        with pytest.raises(RuntimeError, match="elsewhere"):
            _gradients(output, list(leaves.values()), [network.kept[0]], torch.ones(2, 3))


def test_a_compiled_network_is_not_compiled_anew():
    network, counter = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), CompileCounter()
    compiled = torch.compile(network.forward, backend=counter, dynamic=False)
    for _ in range(2):
        compiled(torch.ones(4, 3)).sum().backward()
    with fresh_leaves(network) as leaves:
        gradients = torch.autograd.grad(compiled(torch.ones(4, 3)).sum(), list(leaves.values()))
    assert counter.frame_count == 1 and all(gradient is not None for gradient in gradients)
