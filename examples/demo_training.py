"""The training runs of the demo: the same loop for fixed rates, for APO and for APO-Precond."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.optim import Optimizer

import apo

BATCH_SIZE = 32
OPTIMIZERS = {
    "SGD with momentum 0.9": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "Adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr),
}
PRECONDITIONED = "APO-Precond"


@dataclass(frozen=True)
class Job:
    """One training run: an entry of `OPTIMIZERS` or `PRECONDITIONED`, its initial rate, and whether APO learns it."""

    optimizer: str
    rate: float
    tuned: bool
    seed: int
    epochs: int


@dataclass
class Run:
    """What a training run left behind; `losses` has the loss on all training data, before and after every epoch."""

    job: Job
    losses: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    steps: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # learned there


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training inputs, test inputs, training and test labels; always the same split."""
    data = load_digits()
    split = train_test_split(data.data / 16, data.target, test_size=0.25, stratify=data.target, random_state=0)
    return tuple(torch.tensor(part, dtype=torch.float32 if part.ndim == 2 else torch.long) for part in split)  # type: ignore


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))


def build(job: Job, model: nn.Module) -> apo.Rule | Optimizer:
    if job.optimizer == PRECONDITIONED:
        # warm_start scales the first matrix on the first batch, so its initial rate matters as little as above.
        return apo.Preconditioned(apo.Kronecker(model, lr=job.rate), warm_start=0.5)
    return OPTIMIZERS[job.optimizer](model.parameters(), job.rate)


def batches(job: Job) -> Iterator[Tensor]:
    """Yield the indices of the batches of one epoch after the other, an empty one at the end of each epoch."""
    generator = torch.Generator().manual_seed(job.seed)
    count = len(digits()[0])
    for _ in range(job.epochs):
        order = torch.randperm(count, generator=generator)
        yield from order[: count - count % BATCH_SIZE].split(BATCH_SIZE)
        yield order[:0]


def train(job: Job) -> Run:
    torch.set_num_threads(1)  # the network is tiny, and runs go side by side
    torch.manual_seed(job.seed)
    inputs, test_inputs, labels, test_labels = digits()
    model, criterion, run = network(), nn.CrossEntropyLoss(), Run(job)
    rule = build(job, model)
    optimizer = rule.optimizer if isinstance(rule, apo.Rule) else rule
    steps = job.epochs * (len(inputs) // BATCH_SIZE)
    tuner = apo.attach(rule, model, criterion, total_steps=steps) if job.tuned else None  # all that APO needs

    def training_loss() -> float:
        with torch.no_grad():
            return nn.functional.cross_entropy(model(inputs), labels).item()

    run.losses.append(training_loss())
    try:
        for batch in batches(job):
            if not len(batch):
                run.losses.append(training_loss())
                continue
            optimizer.zero_grad()
            criterion(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
            if tuner is not None:  # the rate in force; seeds differ in when their meta-steps are
                run.steps.append(len(run.steps))
                run.rates.append(optimizer.param_groups[0]["lr"])
    except apo.NonFiniteError:
        run.losses.append(math.nan)
    run.accuracy = 100 * (model(test_inputs).argmax(1) == test_labels).float().mean().item()
    return run


def jobs(decades: Iterable[int], seeds: int, epochs: int) -> list[Job]:
    grid = itertools.product(OPTIMIZERS, decades, (False, True), range(seeds))
    tuning = [Job(optimizer, 10.0**decade, tuned, seed, epochs) for optimizer, decade, tuned, seed in grid]
    return tuning + [Job(PRECONDITIONED, 1.0, True, seed, epochs) for seed in range(seeds)]
