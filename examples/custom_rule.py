"""A custom rule: learn how much slower the lower layers should learn than the upper ones.

Fine-tuning recipes give layer i of n the rate eta * gamma ** (n - 1 - i) and leave eta and gamma to a search. Here both
are learned. The tutorial docs/custom-rule.md explains it line by line.

    python examples/custom_rule.py
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import apo
from apo.rules import moving_parameters


class LayerwiseRate(apo.Rule):
    """Learn eta and gamma for an optimizer with one param group per layer, ordered from input to output."""

    def __init__(self, optimizer: torch.optim.Optimizer, meta_rate: float = 0.1) -> None:
        self.optimizer = optimizer
        self._log_eta = torch.tensor(math.log(optimizer.param_groups[-1]["lr"]), dtype=torch.float64)
        self._log_gamma = torch.tensor(0.0, dtype=torch.float64)
        self.meta_optimizer = torch.optim.Adam(self.phi(), lr=meta_rate, betas=(0.0, 0.99))
        self._show()

    def phi(self) -> list[Tensor]:
        return [self._log_eta, self._log_gamma]

    def layer_rates(self) -> list[float]:
        count = len(self.optimizer.param_groups)
        return [math.exp(float(self._log_eta + (count - 1 - i) * self._log_gamma)) for i in range(count)]

    @contextmanager
    def measuring(self) -> Iterator[None]:
        for group in self.optimizer.param_groups:
            group["lr"] = 1.0  # the step of this iteration is only measured; see propose
        try:
            yield
        finally:
            self._show()

    def propose(self, theta: Mapping[Tensor, Tensor]) -> apo.Proposal:
        return LayerwiseProposal(self, theta)

    def meta_update(self, gradients: Sequence[Tensor]) -> None:
        super().meta_update(gradients)
        self._show()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        super().load_state_dict(state)
        self._show()

    def _show(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.layer_rates(), strict=True):
            group["lr"] = rate


class LayerwiseProposal(apo.Proposal):
    """One step of the optimizer as a function of log eta and log gamma."""

    def __init__(self, rule: LayerwiseRate, theta: Mapping[Tensor, Tensor]) -> None:
        super().__init__(moving_parameters(rule.optimizer))
        self.rule = rule
        self.steps = [(p - theta[p]).detach() for p in self.parameters]  # per unit of the rate
        groups = rule.optimizer.param_groups
        layer_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
        self.layers = [layer_of[p] for p in self.parameters]
        self.heights = [len(groups) - 1 - layer for layer in self.layers]  # how far below the output

    def displacement(self) -> list[Tensor]:
        rates = self.rule.layer_rates()
        return [rates[layer] * step for layer, step in zip(self.layers, self.steps, strict=True)]

    def pull_back(self, cotangent: Sequence[Tensor]) -> list[Tensor]:
        slopes = torch.stack([(h * d).sum() for h, d in zip(cotangent, self.displacement(), strict=True)])
        return [slopes.sum(), slopes @ torch.tensor(self.heights, dtype=slopes.dtype, device=slopes.device)]

    @torch.no_grad()
    def take_step(self) -> None:
        for p, d in zip(self.parameters, self.displacement(), strict=True):
            p.add_(d)

    def summary(self) -> dict[str, float]:
        return {"gamma": math.exp(float(self.rule.phi()[1]))}


def main(epochs: int = 20) -> float:
    torch.manual_seed(0)
    data = load_digits()
    inputs, labels = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    layers = [{"params": layer.parameters()} for layer in model if isinstance(layer, nn.Linear)]
    rule = LayerwiseRate(torch.optim.RMSprop(layers, lr=1e-3))
    tuner = apo.APO(rule, model, criterion=nn.functional.cross_entropy)
    train, test = torch.randperm(len(inputs)).split(1350)
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train))].split(32):
            tuner.step(inputs[batch], labels[batch])
    accuracy = (model(inputs[test]).argmax(1) == labels[test]).float().mean().item()
    print(f"test accuracy {accuracy:.1%}, rates by layer {', '.join(f'{rate:.2g}' for rate in rule.layer_rates())}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    main(parser.parse_args().epochs)
