from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.lifecycle.harness import DOORS, Run, assert_equal_bits, assert_same_run, batch
from torch import nn

import apo

RULES = ["sgdm", "adam", "kronecker", "rate and momentum"]
FSD_BATCHES = {"same": "same", "list": [batch(700, dtype=torch.float64)]}


def accumulate(run: Run, index: int, pieces: int, weight: float) -> None:
    inputs, target = run.batch(index)
    run.optimizer.zero_grad()
    for x, y in zip(inputs.chunk(pieces), target.chunk(pieces), strict=True):
        run.backward(x, y, weight=weight)
    run.update()


def assert_close_runs(left: Run, right: Run) -> None:
    for one, other in zip(left.model.parameters(), right.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert left.tuner.rule.rates() == pytest.approx(right.tuner.rule.rates(), rel=1e-10)
    for one, other in zip(left.tuner.history, right.tuner.history, strict=True):
        assert one.scalars() == pytest.approx(other.scalars(), rel=1e-5, abs=1e-9)  # records are float32


@pytest.mark.parametrize("fsd_batch", FSD_BATCHES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("door", DOORS)
def test_four_quarters_of_a_batch_are_the_batch(door, rule, fsd_batch):
    whole, pieces = (Run(door, rule, dtype=torch.float64, fsd_batch=FSD_BATCHES[fsd_batch]) for _ in range(2))
    for index in range(7):
        whole.step(*whole.batch(index))
        accumulate(pieces, index, pieces=4, weight=0.25)
    assert len(pieces.tuner.history) == 3
    assert_close_runs(whole, pieces)


@pytest.mark.parametrize("door", DOORS)
def test_summed_losses_are_a_loss_four_times_as_large(door):
    def four_times(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 4 * F.cross_entropy(output, target)

    options = {"dtype": torch.float64, "fsd_batch": [batch(700, dtype=torch.float64)], "other_batch_share": 0.0}
    whole = Run(door, loss=four_times, discrepancy=apo.CategoricalKL(), **options)
    pieces = Run(door, **options)
    for index in range(7):
        whole.step(*whole.batch(index))
        accumulate(pieces, index, pieces=4, weight=1.0)
    assert_close_runs(whole, pieces)
    assert pieces.tuner.history[0].loss == pytest.approx(4 * F.cross_entropy(*first_prediction()).item(), rel=1e-5)


def first_prediction() -> tuple[torch.Tensor, torch.Tensor]:
    run = Run("explicit", dtype=torch.float64)
    inputs, target = run.batch(0)
    return run.model(inputs).detach(), target


@pytest.mark.parametrize("door", DOORS)
def test_the_previous_batch_of_an_accumulated_step_is_its_last_micro_batch(door):
    run = Run(door)
    for index in range(4):
        accumulate(run, index, pieces=2, weight=0.5)
    last = run.batch(2)[0].chunk(2)[1]
    assert torch.equal(run.tuner.fsd_batches.state_dict()["previous"]["calls"][0][0][0], last)


@pytest.mark.parametrize("door", DOORS)
def test_two_losses_in_one_backward_pass_both_count(door):
    # The attached door sees one backward pass of a sum of two losses; the explicit one, two micro-batches.
    run = Run(door, "sgdm", dtype=torch.float64, fsd_batch="same")
    (x1, y1), (x2, y2) = run.batch(0), run.batch(1)
    expected = (F.cross_entropy(run.model(x1), y1) + F.cross_entropy(run.model(x2), y2)).item()
    if door == "explicit":
        run.backward(x1, y1)
        run.backward(x2, y2)
    else:
        first = run.criterion(run.model(x1), y1)
        second = run.criterion(run.model(x2), y2)
        (first + second).backward()
    run.update()
    assert run.tuner.history[0].loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("door", DOORS)
def test_a_pass_whose_gradients_were_cleared_is_forgotten(door, set_to_none):
    runs = [Run(door, fsd_batch="same"), Run(door, fsd_batch="same")]
    for attempt, run in enumerate(runs):
        if attempt:
            run.backward(*run.batch(5))
            run.optimizer.zero_grad(set_to_none=set_to_none)
        run.backward(*run.batch(0))
        run.update()
    assert_same_run(*runs)


@pytest.mark.parametrize("rule", ["paper", "kronecker"])
@pytest.mark.parametrize("door", DOORS)
def test_the_look_ahead_goes_along_the_clipped_gradient(door, rule):
    run = Run(door, rule)
    run.backward(*run.batch(0))
    nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
    run.update()
    assert run.tuner.history[0].wsd == pytest.approx(0.5 * (0.05 * 1e-3) ** 2, rel=1e-3)


def test_clipping_reaches_the_weights_of_a_meta_step():
    run = Run("attached", lambda model: torch.optim.SGD(model.parameters(), lr=0.1), interval=1)
    before = run.weights()
    run.backward(*run.batch(0))
    nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
    run.update()
    moved = torch.cat([(a - b).flatten() for a, b in zip(run.weights(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(run.lr * 1e-3, rel=1e-3)


@pytest.mark.parametrize("rule", RULES)
def test_a_closure_gives_the_same_steps(rule):
    plain, closed = Run("attached", rule), Run("attached", rule)
    plain.train(range(7))
    for index in range(7):

        def closure(index: int = index) -> torch.Tensor:
            closed.optimizer.zero_grad()
            inputs, target = closed.batch(index)
            loss = closed.criterion(closed.model(inputs), target)
            loss.backward()
            return loss

        assert closed.optimizer.step(closure) is not None
    assert_same_run(plain, closed)


@pytest.mark.parametrize("rule", RULES)
def test_a_closure_that_fails_leaves_a_tuner_that_goes_on(rule):
    whole, broken = Run("attached", rule).train(range(6)), Run("attached", rule)

    def closure() -> float:
        raise KeyboardInterrupt

    before = broken.weights()
    with pytest.raises(KeyboardInterrupt):
        broken.optimizer.step(closure)
    assert_equal_bits(before, broken.weights())
    broken.train(range(6))
    assert_same_run(whole, broken)


def test_after_a_closure_that_failed_detaching_shows_the_rate_in_force():
    run = Run("attached")

    def closure() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.optimizer.step(closure)
    run.tuner.detach()
    assert run.lr == pytest.approx(0.05)
