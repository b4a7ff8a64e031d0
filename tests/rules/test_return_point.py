"""A network that is lost goes back to its last good weights, with an optimizer that starts again."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apo
from apo.rules.return_point import _STEPS, ReturnPoint


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
    )


def batches(count):
    torch.manual_seed(1)
    centers = 2 * torch.randn(3, 8)
    for _ in range(count):
        y = torch.randint(3, (32,))
        yield centers[y] + torch.randn(32, 8), y


def build(optimizer, **options):
    model = network()
    return model, apo.APO(optimizer(model.parameters()), model, F.cross_entropy, **options)


def accuracy(model):
    x, y = next(iter(batches(1)))
    return float((model.eval()(x).argmax(1) == y).float().mean())


def kill(model):
    with torch.no_grad():
        model[3].bias.fill_(-1e4)  # all ReLUs behind it are off
        model[5].weight.zero_()


def spoil(model):
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
        model[1].running_mean.fill_(float("nan"))


def blow_up(model):
    with torch.no_grad():
        model[5].weight.mul_(-1e6)


def overflow(model):
    """The loss stays finite, the next step does not."""
    with torch.no_grad():
        model[3].weight.mul_(1e16)
        model[5].weight.mul_(-1e20)


OPTIMIZERS = {
    "sgdm": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
@pytest.mark.parametrize("harm", [kill, spoil, blow_up, overflow])
def test_a_network_that_dies_early_is_brought_back_and_learns(optimizer, harm):
    model, tuner = build(optimizer, total_steps=400)
    with pytest.warns(apo.ApoWarning, match="the network was lost.*went back to where the loss last fell"):
        for step, batch in enumerate(batches(400)):
            if step == 60:
                harm(model)
            tuner.step(*batch)
    assert accuracy(model) > 0.9
    assert all(bool(t.isfinite().all()) for t in model.state_dict().values())


def test_weights_buffers_and_state_go_back():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    point = ReturnPoint(model, optimizer)
    point.keep(0, 1.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    F.cross_entropy(model(torch.randn(8, 8)), torch.randint(3, (8,))).backward()
    optimizer.step()
    spoil(model)
    assert point.go_back() and not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.step()  # it builds its state again


def test_the_last_copy_is_kept_and_none_after_two_thousand_steps():
    model = network()
    point = ReturnPoint(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not point.go_back()
    point.keep(0, 1.0)
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    point.keep(10, 1.0)
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    assert point.go_back() and bool((model[0].weight == 2.0).all())
    point.expire(_STEPS - 1)
    assert point.kept
    point.expire(_STEPS)
    assert not point.kept and not point.go_back()
    point.keep(_STEPS, 1.0)
    assert not point.kept


def test_a_network_that_dies_late_does_not_go_back_to_its_beginnings(monkeypatch):
    monkeypatch.setattr("apo.rules.return_point._STEPS", 50)
    model, tuner = build(OPTIMIZERS["sgdm"])
    for batch in batches(60):
        tuner.step(*batch)
    spoil(model)
    with pytest.raises(apo.NonFiniteError):
        for batch in batches(20):
            tuner.step(*batch)
    assert not tuner.engine._return_point.kept


def test_an_optimizer_that_has_state_before_its_first_step_keeps_no_return_point():
    model = network()
    point = ReturnPoint(model, torch.optim.Adagrad(model.parameters()))
    point.keep(0, 1.0)
    assert not point.kept


class Factors(nn.Module):
    """A matrix factorisation: its loss overflows long before its weights do."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(20, 4), nn.Embedding(20, 4)

    def forward(self, x):
        return (self.users(x[:, 0]) * self.items(x[:, 1])).sum(1)


def test_huge_weights_whose_loss_overflows_go_back_although_they_are_finite():
    torch.manual_seed(0)
    model = Factors()
    tuner = apo.APO(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, F.mse_loss)
    *first, last = [(torch.randint(20, (32, 2)), torch.randn(32)) for _ in range(41)]
    for batch in first:
        tuner.step(*batch)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e12)
    with pytest.warns(apo.ApoWarning, match="went back"):
        tuner.step(*last)
    assert max(p.abs().max().item() for p in model.parameters()) < 1e3


def test_data_that_are_not_finite_are_still_an_error():
    _, tuner = build(OPTIMIZERS["sgdm"])
    for x, y in batches(3):
        tuner.step(x, y)
    with pytest.raises(apo.NonFiniteError, match="look for NaN in the data"):
        tuner.step(torch.full_like(x, float("nan")), y)


def test_data_that_are_not_finite_are_an_error_for_weights_that_start_at_zero():
    model = nn.Linear(8, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    tuner = apo.APO(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, F.cross_entropy, interval=1)
    x, y = next(iter(batches(1)))
    tuner.step(x, y)
    with pytest.raises(apo.NonFiniteError, match="look for NaN in the data"):
        tuner.step(torch.full_like(x, float("nan")), y)


def test_only_a_loss_that_has_grown_a_hundredfold_says_that_the_weights_exploded():
    model = network()
    point = ReturnPoint(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not point.is_far_below(1e9)  # nothing is kept
    point.keep(0, 0.5)
    assert point.is_far_below(51.0) and not point.is_far_below(49.0)


@pytest.mark.parametrize("is_huge", [True, False])
def test_an_infinite_step_goes_back_at_a_huge_loss_and_is_an_error_at_an_ordinary_one(is_huge):
    model, tuner = build(OPTIMIZERS["sgdm"])
    *first, last = batches(31)
    for batch in first:
        tuner.step(*batch)
    before = [p.detach().clone() for p in model.parameters()]
    model[0].weight.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    factor = 1e6 if is_huge else 1.0
    tuner.engine.criterion = lambda output, target: factor * F.cross_entropy(output, target)
    if is_huge:
        with pytest.warns(apo.ApoWarning, match="went back"):
            tuner.step(*last)
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    else:
        with pytest.raises(apo.NonFiniteError, match="would make the weights infinite"):
            tuner.step(*last)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_the_setback_is_the_loss_of_now_above_that_at_the_kept_weights_on_the_same_batch(monkeypatch):
    """Oracle: both losses by hand, at float64. Nothing else changes by asking."""
    model = network().double()
    first, asked = copy.deepcopy(model), []
    tuner = apo.APO(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, F.cross_entropy)
    after = tuner.rule.after

    def ask(outcome):
        if outcome.step == 5:
            now = copy.deepcopy(model)
            asked.append((outcome.setback(), now))
            assert all(torch.equal(value, now.state_dict()[name]) for name, value in model.state_dict().items())
        return after(outcome)

    monkeypatch.setattr(tuner.rule, "after", ask)
    for step, (x, y) in enumerate(batches(6)):
        x = x.double()
        tuner.step(x, y)
        if step == 0:  # its weights are kept, and no later ones
            monkeypatch.setattr(tuner.engine._return_point, "keep", lambda step, loss: None)
    ((setback, now),) = asked
    with torch.no_grad():
        expected = F.cross_entropy(now.train()(x), y) - F.cross_entropy(first.train()(x), y)
    assert setback == pytest.approx(float(expected), abs=1e-12) and setback != 0.0


def test_kept_weights_are_in_force_for_a_while_and_then_those_of_before_whoever_has_copied_them():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    point = ReturnPoint(model, torch.optim.SGD(model.parameters(), lr=0.1))
    kept = [p.detach().clone() for p in model.parameters()]
    point.keep(0, loss=1.0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    now = [p.detach().clone() for p in model.parameters()]
    known = {p: p.detach().clone() for p in model[0].parameters()}
    with point.in_force(known):
        assert all(map(torch.equal, model.parameters(), kept))
    assert all(map(torch.equal, model.parameters(), now))
