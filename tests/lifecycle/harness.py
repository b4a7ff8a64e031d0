"""The same training through either front door, so that one test can speak about both."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam

import apo

DOORS = ("explicit", "attached")
FEATURES, CLASSES = 6, 3


def plain_network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def network_with_dropout_and_batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES))


def batch(index: int, size: int = 16, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return a batch that depends on its index alone, so that a resumed run sees the same ones."""
    generator = torch.Generator().manual_seed(1000 + index)
    inputs = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), (2 * inputs[:, :CLASSES] + inputs[:, CLASSES:]).argmax(dim=1)


def sgdm(model: nn.Module, lr: float = 0.05, **options: Any) -> SGD:
    return SGD(model.parameters(), lr=lr, momentum=0.9, **options)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = model.children()
    return [
        {"params": list(first.parameters()), "lr": 0.02},
        {"params": [p for module in rest for p in module.parameters()], "lr": 0.1},
    ]


def kronecker(model: nn.Module, warmup_steps: int = 0) -> apo.Kronecker:
    warmup = {"warmup": sgdm(model, 0.01), "warmup_steps": warmup_steps} if warmup_steps else {}
    return apo.Kronecker(model, lr=0.05, momentum=0.5, **warmup)  # type: ignore[arg-type]


RULES: dict[str, Callable[[nn.Module], Any]] = {
    "sgdm": sgdm,
    "adam": lambda model: Adam(model.parameters(), lr=1e-3),
    "per group": lambda model: apo.LearningRate(SGD(two_groups(model), lr=0.1, momentum=0.9), per_group=True),
    "paper": lambda model: apo.LearningRate.paper(sgdm(model)),
    "kronecker": kronecker,
    "kronecker warming up": lambda model: apo.Preconditioned(kronecker(model, warmup_steps=8), warmup_interval=1),
    "diagonal": lambda model: apo.Diagonal(model, lr=0.05),
    "full": lambda model: apo.Full(model, lr=0.05),
    "rate and momentum": lambda model: apo.RateAndMomentum(sgdm(model, weight_decay=1e-3)),
}


class Run:
    """One training run through one of the doors.

    Args:
        door: ``"explicit"`` or ``"attached"``.
        rule: A name in :data:`RULES`, or a function from a network to a rule or an optimizer.
        network: Builds the network.
        loss: The loss function.
        dtype: Of weights and data.
        **options: Of the tuner.
    """

    def __init__(
        self,
        door: str,
        rule: str | Callable[[nn.Module], Any] = "sgdm",
        network: Callable[[], nn.Module] = plain_network,
        loss: Callable[..., Tensor] = F.cross_entropy,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.door, self.dtype = door, dtype
        self.model = network().to(dtype)
        self.criterion = loss if isinstance(loss, nn.Module) else apo.criterion(loss)
        chosen = RULES[rule](self.model) if isinstance(rule, str) else rule(self.model)
        options = {"interval": 3} | options
        if door == "explicit":
            self.tuner: apo.Tuner = apo.APO(chosen, self.model, loss, **options)
        else:
            self.tuner = apo.attach(chosen, self.model, self.criterion, **options)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.tuner.optimizer

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def batch(self, index: int, size: int = 16) -> tuple[Tensor, Tensor]:
        return batch(index, size, self.dtype)

    def backward(self, inputs: Any, target: Tensor, weight: float = 1.0) -> None:
        if isinstance(self.tuner, apo.APO):
            self.tuner.backward(inputs, target, weight=weight)
        else:
            (self.criterion(self.model(inputs), target) * weight).backward()

    def update(self) -> None:
        if isinstance(self.tuner, apo.APO):
            self.tuner.step()
        else:
            self.optimizer.step()

    def step(self, inputs: Any, target: Tensor) -> None:
        if isinstance(self.tuner, apo.APO):
            self.tuner.step(inputs, target)
        else:
            self.optimizer.zero_grad()
            self.backward(inputs, target)
            self.optimizer.step()

    def train(self, indices: Iterable[int], scheduler: Any = None) -> Run:
        for index in indices:
            self.step(*self.batch(index))
            if scheduler is not None:
                scheduler.step()
        return self

    def weights(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self.model.state_dict().values()]


def saved_and_loaded(state: Any) -> Any:
    """Take a checkpoint through a file, the careful way."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_equal_bits(left: Iterable[Tensor], right: Iterable[Tensor]) -> None:
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other), f"largest difference {(one - other).abs().max():g}"


def assert_same_run(left: Run, right: Run) -> None:
    assert_equal_bits(left.weights(), right.weights())
    assert left.tuner.rule.rates() == right.tuner.rule.rates()
    assert list(left.tuner.history) == list(right.tuner.history)


class Loader:
    """An iterable of batches that is no sequence, like a DataLoader; it can be started again."""

    def __init__(self, length: int = 4) -> None:
        self.length = length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (batch(500 + index) for index in range(self.length))


class StatefulLoader:
    """An iterable that knows its own place, like torchdata's StatefulDataLoader."""

    def __init__(self, length: int = 4) -> None:
        self.length, self.position = length, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.position < self.length:
            self.position += 1
            yield batch(500 + self.position)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
