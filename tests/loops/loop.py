"""What the training loops of this folder share: data, the same loop at fixed rates, and what is asked of every loop.

A loop is a function ``loop(lr, attach)`` that builds its network and optimizer, calls ``attach(optimizer, model,
criterion)`` where its author would write ``apo.attach``, trains, and returns a :class:`Run`. Its figure is one of which
less is better: a mean loss, or the share of wrong answers.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import apo


@dataclass
class Run:
    """How a loop ended: its figure before and after training, and the tuner of a loop with apo."""

    start: float
    end: float
    tuner: Any = None


Loop = Callable[[float, Callable[..., Any]], Run]


def without_apo(*_: Any, **__: Any) -> None:
    """Stand in for ``apo.attach`` in a loop that trains at the rate it was given."""


def best_fixed(loop: Loop, rates: Sequence[float]) -> Run:
    """Train the loop without apo at each of the rates and return the best end."""
    return min(
        (at_fixed(loop, rate) for rate in rates), key=lambda run: run.end if math.isfinite(run.end) else math.inf
    )


@functools.cache
def at_fixed(loop: Loop, rate: float) -> Run:
    """Train the loop without apo, once for all tests that ask."""
    return loop(rate, without_apo)


def assert_learns(
    loop: Loop, good_rates: Sequence[float], initial: float = 1e-6, short: float = 0.1, may_be_good: bool = False
) -> Run:
    """Assert that apo, from a bad initial rate, makes all of the progress of the best fixed rate but a share ``short``.

    The initial rate, kept fixed, must miss this mark, or the loop would prove nothing (unless it ``may_be_good``: one
    of several that must all do).
    """
    best, still = best_fixed(loop, good_rates), at_fixed(loop, initial)
    mark = best.end + short * (best.start - best.end)
    assert best.end < best.start, f"none of the rates {good_rates} is good: {best}"
    assert may_be_good or not still.end <= mark, (
        f"the initial rate {initial} is good already: {still.end:.4g} against {mark:.4g}"
    )
    run = loop(initial, apo.attach)
    assert_at_work(run.tuner, initial)
    story = f"{run.start:.4g} -> {run.end:.4g} at {rate_of(run):.2g}, best fixed {best.end:.4g}, mark {mark:.4g}"
    print(story)
    assert run.end < run.start, f"ended worse than it started: {story}"
    assert run.end <= mark, story
    return run


def assert_at_work(tuner: Any, initial: float | None = None) -> None:
    """Assert that every meta-step that was due happened, and that what is learned has moved."""
    assert tuner.steps > 1
    steps = [record.step for record in tuner.history]
    assert steps[0] == 0
    for last, step in itertools.pairwise([*steps, tuner.steps]):
        longest = tuner.interval
        if longest == "auto":
            longest = next(interval for until, interval in tuner.rule.auto_intervals if step <= until)
        assert step - last <= longest, "meta-steps were due and did not happen"
    assert any(record.updated for record in tuner.history)
    learned = tuner.rule.learned_rates()[0]
    assert math.isfinite(learned)
    assert initial is None or learned != initial, "the learned rate has not moved"


#: What a warning that a network does not learn may be about.
TRAINING = r"\b(rate|loss|progress|gradients?)\b"


@dataclass
class Said:
    """What a loop with apo said while it trained, and how it ended (None: it was refused)."""

    run: Run | None
    sentences: list[str]


def hear(loop: Loop, initial: float) -> Said:
    """Train a loop with apo; collect apo's warnings, and the sentence of an error that ends it."""
    run, errors = None, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run = loop(initial, apo.attach)
        except (ValueError, TypeError, RuntimeError, FloatingPointError) as error:
            errors.append(str(error))
    spoken = [str(warning.message) for warning in caught if issubclass(warning.category, apo.ApoWarning)]
    return Said(run, spoken + errors)


def assert_not_silently_lost(loop: Loop, good_rates: Sequence[float], initial: float, short: float, about: str) -> Said:
    """Assert that a loop works as :func:`assert_learns` asks, or that apo says a sentence that matches ``about``."""
    best, said = best_fixed(loop, good_rates), hear(loop, initial)
    mark = best.end + short * (best.start - best.end)
    assert best.end < best.start
    story = "" if said.run is None else f"{said.run.start:.4g} -> {said.run.end:.4g} at {rate_of(said.run):.2g}"
    print(story, f"best fixed {best.end:.4g}, mark {mark:.4g}", said.sentences)
    if any(re.search(about, sentence) and "\n" not in sentence for sentence in said.sentences):
        return said
    assert said.run is not None, f"refused, but not with a sentence about {about!r}: {said.sentences}"
    assert_at_work(said.run.tuner, initial)
    assert said.run.end <= mark, f"silently lost: {story}, best fixed {best.end:.4g}, mark {mark:.4g}, {said.sentences}"
    return said


def rate_of(run: Run) -> float:
    """Return the rate in force at the end."""
    return float(run.tuner.optimizer.param_groups[0]["lr"])


@functools.cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scikit-learn's digits as training inputs, labels, test inputs, labels."""
    data = load_digits()
    inputs, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1297], order[1297:]
    return inputs[train], labels[train], inputs[test], labels[test]


def batches(steps: int, *data: Tensor, size: int = 64) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches of the data, shuffled again in every epoch, the same ones in every run."""
    generator = torch.Generator().manual_seed(1)
    given = 0
    while True:
        for index in torch.randperm(len(data[0]), generator=generator).split(size)[: len(data[0]) // size]:
            if given == steps:
                return
            given += 1
            yield tuple(part[index] for part in data)


def digit_batches(steps: int, size: int = 64) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches of the digits for training."""
    return batches(steps, *digits()[:2], size=size)


def mlp(inputs: int = 64, outputs: int = 10, hidden: int = 50) -> nn.Sequential:
    """Build the same small network in every run."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


@torch.no_grad()
def wrong(model: Callable[[Tensor], Tensor], flat: bool = True) -> float:
    """Return the share of the test digits that a network gets wrong; the network is left in the mode it was in."""
    _, _, inputs, labels = digits()
    inputs = inputs if flat else inputs.view(-1, 1, 8, 8)
    training = isinstance(model, nn.Module) and model.training
    if isinstance(model, nn.Module):
        model.eval()
    share = float((model(inputs).argmax(-1) != labels).float().mean())
    if training:
        model.train()
    return share
