"""What goes wrong is said, counted and never left in the weights."""

import itertools
import warnings

import pytest
import torch
from tests.core import networks
from tests.core.scripted import Scripted
from torch import nn
from torch.nn import functional as F

import apo


class Spoiled(nn.Module):
    """A criterion that multiplies its value by `factor`, after the first call of a step only if `later` is set."""

    def __init__(self, factor, later=False):
        super().__init__()
        self.factor, self.later, self.calls = factor, later, itertools.count(1)  # which apo cannot put back

    def forward(self, outputs, target):
        is_first = next(self.calls) == 1
        loss = F.cross_entropy(outputs, target)
        return loss if self.later and is_first else loss * self.factor


def rate_rule(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return apo.LearningRate(optimizer, **({"warm_start": False} | options))


def preconditioned_rule(model):
    return apo.Preconditioned(apo.Kronecker(model, lr=0.05))


def momentum_rule(model):
    return apo.RateAndMomentum(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5))


RULES = {"learning-rate": rate_rule, "preconditioned": preconditioned_rule, "rate-and-momentum": momentum_rule}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def start(rule=rate_rule, criterion=F.cross_entropy, **options):
    model = networks.build("norm-and-dropout", torch.float32)
    common = {"interval": 1, "discrepancy": apo.CategoricalKL()}
    return apo.APO(rule(model), model, criterion=criterion, **(common | options))


def batches(count=3):
    return networks.batches("norm-and-dropout", count, dtype=torch.float32)


def weights(tuner):
    return [p.detach().clone() for p in tuner.model.parameters()]


def assert_weights(tuner, expected):
    assert all(torch.equal(p, q) for p, q in zip(tuner.model.parameters(), expected, strict=True))


@every_rule
@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_a_meta_gradient_that_is_not_finite_is_skipped_counted_and_warned_about_once(rule, factor):
    criterion = Spoiled(factor, later=True)
    tuner = start(rule, criterion, other_batch_share=0.0)  # the second call is that of the look-ahead
    phi, before = [p.clone() for p in tuner.rule.phi()], weights(tuner)
    with pytest.warns(apo.ApoWarning, match=r"step 0: a meta-gradient was not finite.*skipped_meta_updates"):
        tuner.step(*batches()[0])
    for index, batch in enumerate(batches()[1:], start=2):
        criterion.calls = itertools.count(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tuner.step(*batch)
        assert tuner.skipped_meta_updates == index
    assert all(torch.equal(p, q) for p, q in zip(tuner.rule.phi(), phi, strict=True))
    assert not tuner.rule.meta_optimizer.state
    assert [record.updated for record in tuner.history] == [False] * 3
    assert all(p.isfinite().all() for p in tuner.model.parameters())
    assert not any(torch.equal(p, q) for p, q in zip(tuner.model.parameters(), before, strict=True))


def test_after_a_skipped_meta_update_learning_goes_on():
    criterion = Spoiled(float("inf"), later=True)
    tuner = start(criterion=criterion, other_batch_share=0.0)
    with pytest.warns(apo.ApoWarning):
        tuner.step(*batches()[0])
    criterion.factor = 1.0
    rates = tuner.rule.rates()
    tuner.step(*batches()[1])
    assert tuner.history[-1].updated
    assert tuner.rule.rates() != rates
    assert tuner.skipped_meta_updates == 1


@every_rule
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_an_error_and_the_weights_stay(rule, factor):
    criterion = Spoiled(1.0)
    tuner = start(rule, criterion)
    tuner.step(*batches()[0])
    criterion.factor = factor
    before, phi, rates = weights(tuner), [p.clone() for p in tuner.rule.phi()], tuner.rule.rates()
    with pytest.raises(apo.NonFiniteError, match=r"the training loss is (nan|inf) at step 1.*look for NaN in the data"):
        tuner.step(*batches()[1])
    assert_weights(tuner, before)
    assert all(torch.equal(p, q) for p, q in zip(tuner.rule.phi(), phi, strict=True))
    assert tuner.rule.rates() == rates
    assert len(tuner.history) == 1


@every_rule
def test_a_step_that_would_make_the_weights_infinite_is_an_error_and_is_not_taken(rule):
    tuner = start(rule)
    before = weights(tuner)
    tuner.backward(*batches()[0])
    for p in tuner.model.parameters():
        p.grad.fill_(float("inf"))
    with pytest.raises(apo.NonFiniteError, match=r"step 0 would make the weights infinite or NaN.*clip the gradients"):
        tuner.step()
    assert_weights(tuner, before)


class Fragile(nn.Module):
    """Raises at its n-th call."""

    def __init__(self, body, at):
        super().__init__()
        self.body, self.at, self.calls = body, at, itertools.count(1)

    def forward(self, x):
        if next(self.calls) == self.at:
            raise KeyboardInterrupt
        return self.body(x)


@every_rule
@pytest.mark.parametrize("at", [2, 3, 4], ids=["old outputs", "loss at the look-ahead", "fsd at the look-ahead"])
def test_an_interrupted_look_ahead_leaves_theta_the_rate_buffers_and_gradients(rule, at):
    model = Fragile(networks.build("norm-and-dropout", torch.float32), at)
    tuner = apo.APO(rule(model), model, criterion=F.cross_entropy, interval=1)
    before, rates = weights(tuner), tuner.rule.rates()
    tuner.backward(*batches()[0])
    gradients = [p.grad.clone() for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    with pytest.raises(KeyboardInterrupt):
        tuner.step()
    assert_weights(tuner, before)
    assert tuner.rule.rates() == rates
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(b, value) for b, value in zip(model.buffers(), buffers, strict=True))
    tuner.step(*batches()[1])  # and training can continue
    assert len(tuner.history) == 1
    assert not any(torch.equal(p, q) for p, q in zip(tuner.model.parameters(), before, strict=True))


@every_rule
def test_a_batch_that_was_changed_in_place_is_an_error_that_says_so(rule):
    tuner = start(rule)
    x, y = batches()[0]
    before, rates = weights(tuner), tuner.rule.rates()
    tuner.backward(x, y)
    x.add_(1)
    with pytest.raises(apo.ReplayError, match=r"changed in place.*clone it"):
        tuner.step()
    assert_weights(tuner, before)
    assert tuner.rule.rates() == rates


@every_rule
def test_a_step_whose_batch_is_unknown_is_an_error_and_leaves_weights_and_rate(rule):
    tuner = start(rule)
    before, rates = weights(tuner), tuner.rule.rates()
    for p in tuner.model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(apo.ReplayError, match=r"call tuner.backward\(...\) before tuner.step\(\)"):
        tuner.step()
    assert_weights(tuner, before)
    assert tuner.rule.rates() == rates
    assert [float(group["lr"]) for group in tuner.optimizer.param_groups] == list(rates)
    tuner.detach()
    tuner.optimizer.step()  # as an ordinary optimizer at the old rate
    assert not any(torch.equal(p, q) for p, q in zip(tuner.model.parameters(), before, strict=True))
    assert all((p - q).abs().max() < 1 for p, q in zip(tuner.model.parameters(), before, strict=True))


@every_rule
def test_a_source_without_batches_is_an_error_and_leaves_weights_and_rate(rule):
    tuner = start(rule, fsd_batch=[])
    before, rates = weights(tuner), tuner.rule.rates()
    with pytest.raises(apo.MissingBatchError, match="fsd_batch yielded no batch"):
        tuner.step(*batches()[0])
    assert_weights(tuner, before)
    assert tuner.rule.rates() == rates


@pytest.mark.parametrize(("bounds", "weight"), [((0.04, 1e4), 1e6), ((1e-10, 0.06), 0.0)], ids=["lower", "upper"])
def test_a_rate_at_its_bound_stays_there_and_is_warned_about_once(bounds, weight):
    tuner = start(lambda model: rate_rule(model, bounds=bounds), fsd_weight=weight)
    with pytest.warns(apo.ApoWarning, match=r"group 0 has reached its bound 0.0[46]: widen bounds=") as caught:
        for index in range(12):
            tuner.step(*batches()[index % 3])
    assert len(caught) == 1
    rates = tuner.history.column("lr/0")
    assert all(bounds[0] * (1 - 1e-12) <= rate <= bounds[1] * (1 + 1e-12) for rate in rates)
    assert min(abs(rates[-1] / bound - 1) for bound in bounds) < 1e-12


def test_nothing_is_left_out_or_warned_about_in_a_healthy_run():
    tuner = start(lambda model: rate_rule(model, meta_optimizer=Scripted))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches():
            tuner.step(*batch)
    assert tuner.skipped_meta_updates == 0
    assert all(record.updated for record in tuner.history)


def test_the_warm_start_waits_for_the_first_step_that_has_gradients():
    tuner = start(lambda model: torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9))
    with pytest.warns(apo.ApoWarning, match="no parameter of the optimizer has a gradient"):
        tuner.step()
    assert tuner.steps == 1 and not tuner.history
    tuner.step(*batches()[0])
    assert tuner.rule.rates()[0] > 1e-3
