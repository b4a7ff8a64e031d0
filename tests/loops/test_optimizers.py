"""Every optimizer that apo accepts learns a good rate: torch's, and some of pytorch_optimizer's.

What it is held against has nothing of apo in it, and takes as long as all the rest: it is noted in a file, and trained
again for a few optimizers only. A new optimizer needs a new file:

    PYTHONPATH=src:. python tests/loops/test_optimizers.py
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.loops.loop import Run, assert_at_work, assert_learns, digit_batches, mlp, wrong
from torch import nn

import apo

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")

STEPS = 600
INITIAL = [1e-6, 1e-3, 10.0]
#: What the seven fixed rates are multiples of.
MULTIPLES = [10.0 ** (power / 2) for power in range(-3, 4)]
POINTS = 0.02
NOTED = Path(__file__).with_name("best_of_seven.json")
#: What the order of summation changes, of another machine or of another version of torch.
ROUNDING = 0.01


def matrices_only() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 50, bias=False), nn.ReLU(), nn.Linear(50, 10, bias=False))


def of_torch(name: str, **options: Any) -> Callable[[Any, float], torch.optim.Optimizer]:
    return lambda parameters, lr: getattr(torch.optim, name)(parameters, lr=lr, **options)


def of_others(name: str, **options: Any) -> Callable[[Any, float], torch.optim.Optimizer]:
    return lambda parameters, lr: getattr(pytorch_optimizer, name)(parameters, lr=lr, **options)


#: How to build an optimizer, and a usual rate of it.
OPTIMIZERS: dict[str, tuple[Callable[[Any, float], torch.optim.Optimizer], float]] = {
    "SGD": (of_torch("SGD"), 0.3),
    "SGD with momentum": (of_torch("SGD", momentum=0.9), 0.05),
    "SGD with Nesterov's momentum": (of_torch("SGD", momentum=0.9, nesterov=True), 0.05),
    "Adam": (of_torch("Adam"), 5e-3),
    "AdamW": (of_torch("AdamW"), 5e-3),
    "NAdam": (of_torch("NAdam"), 5e-3),
    "RAdam": (of_torch("RAdam"), 5e-3),
    "RMSprop": (of_torch("RMSprop"), 2e-3),
    "Adagrad": (of_torch("Adagrad"), 0.03),
    "Adadelta": (of_torch("Adadelta"), 3.0),
    "Adamax": (of_torch("Adamax"), 5e-3),
    "Muon": (of_torch("Muon"), 0.02),
    "pytorch_optimizer's AdaBelief": (of_others("AdaBelief"), 5e-3),
    "pytorch_optimizer's Adan": (of_others("Adan"), 5e-3),
    "pytorch_optimizer's ADOPT": (of_others("ADOPT"), 5e-3),
    "pytorch_optimizer's DiffGrad": (of_others("DiffGrad"), 5e-3),
    "pytorch_optimizer's Lamb": (of_others("Lamb"), 2e-2),
    "pytorch_optimizer's Lion": (of_others("Lion"), 1e-3),
    "pytorch_optimizer's NovoGrad": (of_others("NovoGrad"), 2e-2),
    "pytorch_optimizer's QHAdam": (of_others("QHAdam"), 5e-3),
    "pytorch_optimizer's SGDW": (of_others("SGDW", momentum=0.9, weight_decay=0.0), 0.05),
    "pytorch_optimizer's StableAdamW": (of_others("StableAdamW"), 5e-3),
    "pytorch_optimizer's Tiger": (of_others("Tiger"), 1e-3),
    "pytorch_optimizer's Yogi": (of_others("Yogi"), 1e-2),
}


def trained(name: str, lr: float, learn: bool) -> tuple[float, Any]:
    """Train on the digits; return the share of wrong answers and the tuner."""
    make, _ = OPTIMIZERS[name]
    model, criterion = matrices_only() if name == "Muon" else mlp(), nn.CrossEntropyLoss()
    optimizer = make(model.parameters(), lr)
    tuner = apo.attach(optimizer, model, criterion) if learn else None
    for x, y in digit_batches(STEPS):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return wrong(model), tuner


def best_of_seven(name: str) -> float:
    """Train without apo at seven rates; return the smallest share of wrong answers."""
    _, usual = OPTIMIZERS[name]
    return min(trained(name, usual * multiple, learn=False)[0] for multiple in MULTIPLES)


EVERY = list(itertools.product(OPTIMIZERS, INITIAL))


@pytest.fixture(scope="module")
def best() -> dict[str, float]:
    return json.loads(NOTED.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OPTIMIZERS)[1::6])
def test_the_best_of_seven_fixed_rates_is_as_noted(name, best):
    assert best.keys() == OPTIMIZERS.keys()
    assert best_of_seven(name) == pytest.approx(best[name], abs=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_an_optimizer_ends_within_two_points_of_the_best_of_seven_fixed_rates(case, best):
    name, initial = case
    end, tuner = trained(name, initial, learn=True)
    story = f"0.904 -> {end:.4g} at {tuner.optimizer.param_groups[0]['lr']:.2g}, best fixed {best[name]:.4g}"
    print(story)
    assert_at_work(tuner, initial)
    assert end <= best[name] + POINTS + 1e-9, story


@pytest.mark.parametrize("name", ["Prodigy", "DAdaptAdam", "DAdaptSGD", "LaProp"])
def test_an_optimizer_that_finds_its_own_rate_or_remembers_it_is_refused_for_the_right_reason(name):
    model = mlp()
    optimizer = getattr(pytorch_optimizer, name)(model.parameters(), lr=1.0)
    with pytest.raises(apo.NotLinearError, match=f"{name}.*(proportional|state)"):
        apo.attach(optimizer, model, nn.CrossEntropyLoss())


def test_radam_is_not_lost_where_its_first_plain_steps_bear_a_far_larger_rate():
    """A mean over pixels has small gradients, which bear a rate of one; the steps after the fifth divide by them."""

    def loop(lr, attach):
        torch.manual_seed(0)
        sizes = [64, 100, 16, 100, 64]
        layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        model, criterion = nn.Sequential(*layers[:-1]), nn.BCEWithLogitsLoss()
        optimizer = torch.optim.RAdam(model.parameters(), lr=lr)
        tuner, losses = attach(optimizer, model, criterion), []
        for x, _ in digit_batches(300):
            optimizer.zero_grad()
            loss = criterion(model(x), x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Run(losses[0], sum(losses[-20:]) / 20, tuner)

    assert_learns(loop, [0.01, 0.03], initial=1e-5, short=0.1)


class Travelled(torch.optim.Optimizer):
    """SGD that is linear in its rate but sums up its rates, as Prodigy and schedule-free optimizers do."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                p.sub_(group["lr"] / (1 + state.get("travelled", 0.0)) * p.grad)
                state["travelled"] = state.get("travelled", 0.0) + float(group["lr"]) * float(p.grad.norm())


def test_an_optimizer_whose_state_depends_on_its_rate_is_refused():
    model = mlp()
    with pytest.raises(apo.NotLinearError, match=r"Travelled.*state"):
        apo.attach(Travelled(model.parameters(), lr=0.1), model, nn.CrossEntropyLoss())


@pytest.mark.parametrize("name", ["ASGD", "Rprop", "LBFGS", "Adafactor"])
def test_an_optimizer_of_torch_that_is_not_linear_in_its_rate_is_refused(name):
    model = mlp()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
    with pytest.raises(apo.NotLinearError, match=f"{name}.*use SGD, Adam"):
        apo.attach(optimizer, model, nn.CrossEntropyLoss())


if __name__ == "__main__":
    torch.set_num_threads(1)
    NOTED.write_text(json.dumps({name: round(best_of_seven(name), 4) for name in OPTIMIZERS}, indent=2) + "\n")
