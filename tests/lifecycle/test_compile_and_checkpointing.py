from __future__ import annotations

import functools

import pytest
import torch
from tests.lifecycle.harness import (
    CLASSES,
    DOORS,
    FEATURES,
    Run,
    assert_equal_bits,
    batch,
    network_with_dropout_and_batchnorm,
    plain_network,
    sgdm,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import apo


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train_compiled(watched: nn.Module, called: nn.Module, model: nn.Module, door: str) -> apo.Tuner:
    optimizer, criterion = sgdm(model), nn.CrossEntropyLoss()
    if door == "explicit":
        tuner: apo.Tuner = apo.APO(optimizer, called, criterion, interval=3)
    else:
        tuner = apo.attach(optimizer, watched, criterion, interval=3)
    for index in range(7):
        inputs, target = batch(index)
        if isinstance(tuner, apo.APO):
            tuner.step(inputs, target)
        else:
            optimizer.zero_grad()
            criterion(called(inputs), target).backward()
            optimizer.step()
    return tuner


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("watched", ["compiled", "original", "compiled in place"])
@pytest.mark.parametrize("door", DOORS)
def test_a_compiled_network_learns_what_the_original_learns(door, watched, backend):
    plain = Run(door).train(range(7))
    torch.manual_seed(0)
    model = plain_network()
    if watched == "compiled in place":
        model.compile(backend=backend)
        tuner = train_compiled(model, model, model, door)
    else:
        compiled = torch.compile(model, backend=backend)
        tuner = train_compiled(compiled if watched == "compiled" else model, compiled, model, door)
    for one, other in zip(model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert tuner.history.column("lr/0") == pytest.approx(plain.tuner.history.column("lr/0"), rel=1e-4)


@pytest.mark.parametrize("watched, expected", [("original", 1), ("compiled", 2)])  # one for passes without gradient
def test_watching_a_network_hardly_compiles_it_more_often(watched, expected):
    compilations = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]):
        compilations.append(module)
        return module.forward

    model = plain_network()
    compiled = torch.compile(model, backend=backend)
    tuner = train_compiled(compiled if watched == "compiled" else model, compiled, model, "attached")
    assert len(tuner.history) == 3
    assert len(compilations) == expected


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, dropout: float = 0.3) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(dropout))
        self.second = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        # A reentrant checkpoint needs an input with a gradient to let gradients reach its weights.
        return self.second(checkpoint(self.first, inputs.requires_grad_(), use_reentrant=self.reentrant))


class Direct(Checkpointed):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("rule", ["sgdm", "kronecker"])
@pytest.mark.parametrize("door", DOORS)
def test_activation_checkpointing_changes_nothing(door, rule, reentrant):
    runs = []
    for kind in (Checkpointed, Direct):
        run = Run(door, rule, functools.partial(kind, reentrant))
        torch.manual_seed(1)
        runs.append(run.train(range(7)))
    assert_equal_bits(runs[0].weights(), runs[1].weights())
    assert list(runs[0].tuner.history) == list(runs[1].tuner.history)


def test_a_network_that_is_checkpointed_as_a_whole_is_seen_once():
    plain, whole = (Run("attached", network=network_with_dropout_and_batchnorm) for _ in range(2))
    torch.manual_seed(1)
    plain.train(range(7))
    torch.manual_seed(1)
    for index in range(7):
        inputs, target = whole.batch(index)
        whole.optimizer.zero_grad()
        output = checkpoint(whole.model, inputs, use_reentrant=False)
        whole.criterion(output, target).backward()
        whole.optimizer.step()
    assert_equal_bits(list(plain.model.parameters()), list(whole.model.parameters()))
    assert plain.tuner.history.column("loss") == whole.tuner.history.column("loss")
