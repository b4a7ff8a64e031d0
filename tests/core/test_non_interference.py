"""A meta-step leaves buffers, gradients, random streams, modes and flags exactly as an ordinary step does."""

import copy
import functools

import pytest
import torch
from tests.core import networks
from torch import nn
from torch.nn import functional as F

import apo


class Treacherous(nn.Module):
    """Buffers of every kind, layers that are frozen, unused, in evaluation mode or change their mode, and dropout."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.settled = nn.BatchNorm1d(6).eval()
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(6, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.switch = nn.Identity()
        self.register_buffer("replaced", torch.zeros(6))
        self.register_buffer("counter", torch.zeros((), dtype=torch.long), persistent=False)
        self.register_buffer("constant", torch.ones(1).expand(5))  # memory that cannot be written element by element

    def forward(self, x):
        x = self.frozen(self.settled(self.norm(self.body(x))))
        self.replaced = 0.9 * self.replaced + 0.1 * x.detach().mean(0)
        self.counter += 1
        self.switch.train(not self.switch.training)
        return self.head(self.dropout(torch.tanh(x)) + self.replaced + self.constant[0])


class LearnedTemperature(nn.Module):
    """A criterion with a parameter and a buffer of its own, in no optimizer."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, outputs, target):
        self.seen += 1
        return F.cross_entropy(outputs / self.temperature, target)


def parts(model, criterion):
    return nn.ModuleList([model, criterion])


def snapshot(modules):
    """Everything that a training step may leave behind, by name."""
    return {
        **{f"buffer {name}": value.clone() for name, value in modules.named_buffers()},
        **{f"grad {name}": None if p.grad is None else p.grad.clone() for name, p in modules.named_parameters()},
        **{f"flag {name}": p.requires_grad for name, p in modules.named_parameters()},
        **{f"mode {name}": module.training for name, module in modules.named_modules()},
        "random": torch.get_rng_state(),
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        same = torch.equal(found[key], value) if torch.is_tensor(value) else found[key] is value
        assert same, key


def explicit(model, criterion, rule, **options):
    tuner = apo.APO(rule, model, criterion=criterion, **options)
    return tuner, lambda x, y: tuner.step(x, y)


def attached(model, criterion, rule, **options):
    tuner = apo.attach(rule, model, criterion, **options)
    return tuner, lambda x, y: ordinary_step(model, criterion, tuner.optimizer, x, y)


def ordinary_step(model, criterion, optimizer, x, y):
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()


frozen_meta = functools.partial(torch.optim.SGD, lr=0.0)


def learning_rate(model):
    parameters = [p for module in (model.body, model.norm, model.head, model.unused) for p in module.parameters()]
    return apo.LearningRate(torch.optim.SGD(parameters, lr=0.05, momentum=0.9), meta_optimizer=frozen_meta)


def preconditioned(model):
    return apo.Preconditioned(apo.Kronecker(model, lr=0.05), meta_optimizer=frozen_meta, warm_start=0.1)


def eigenbasis(model):
    return apo.Preconditioned(apo.Eigenbasis(model, lr=0.05), meta_optimizer=frozen_meta, warm_start=0.1)


def rate_and_momentum(model):
    return apo.RateAndMomentum(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5), meta_optimizer=frozen_meta)


RULES = {"learning-rate": learning_rate, "preconditioned": preconditioned, "rate-and-momentum": rate_and_momentum}
RULES |= {"eigenbasis": eigenbasis}
DOORS = {"explicit": explicit, "attach": attached}
OPTIONS = {
    "previous": {},
    "same": {"fsd_batch": "same"},
    "stream": {"fsd_batch": networks.batches("norm-and-dropout", 2, dtype=torch.float32)},
    "no-fsd": {"fsd_weight": 0.0, "wsd_weight": 0.1},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("rule", RULES)
def test_a_meta_step_leaves_behind_what_an_ordinary_step_does_bit_for_bit(rule, door, options):
    model, criterion = Treacherous(), LearnedTemperature()
    common = {"interval": 1, "discrepancy": apo.CategoricalKL()}
    tuner, step = DOORS[door](model, criterion, RULES[rule](model), **(common | OPTIONS[options]))
    for x, y in networks.batches("norm-and-dropout", 4, dtype=torch.float32):
        twin = copy.deepcopy(parts(model, criterion))
        for p, q in zip(parts(model, criterion).parameters(), twin.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
        start = torch.get_rng_state()
        step(x, y)
        found = snapshot(parts(model, criterion))
        torch.set_rng_state(start)
        # The gradients of parameters that are not in the optimizer pile up; its own are cleared.
        members = {id(p) for group in tuner.optimizer.param_groups for p in group["params"]}
        for p, q in zip(parts(model, criterion).parameters(), twin.parameters(), strict=True):
            q.grad = None if id(p) in members else q.grad
        twin[1](twin[0](x), y).backward()
        assert_same(found, snapshot(twin))
    assert len(tuner.history) == 4
    assert any("grad 0.body" in key and value is not None for key, value in found.items())


def test_buffers_stay_the_same_objects():
    model = networks.build("norm-and-dropout", torch.float32)
    before = dict(model.named_buffers())
    tuner = apo.APO(torch.optim.SGD(model.parameters(), lr=0.05), model, criterion=F.cross_entropy, interval=1)
    for x, y in networks.batches("norm-and-dropout", 3, dtype=torch.float32):
        tuner.step(x, y)
    assert all(buffer is before[name] for name, buffer in model.named_buffers())


def test_gradients_stay_the_same_objects():
    model = networks.build("norm-and-dropout", torch.float32)
    tuner = apo.APO(torch.optim.SGD(model.parameters(), lr=0.05), model, criterion=F.cross_entropy, interval=1)
    (x, y), *_ = networks.batches("norm-and-dropout", 1, dtype=torch.float32)
    tuner.backward(x, y)
    before = [p.grad for p in model.parameters()]
    values = [gradient.clone() for gradient in before]
    tuner.step()
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), before, strict=True))
    assert all(torch.equal(gradient, value) for gradient, value in zip(before, values, strict=True))


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_the_look_ahead_runs_in_the_mode_of_training(mode):
    model = networks.build("norm-and-dropout", torch.float32).train(mode)
    seen = []
    model[3].register_forward_hook(lambda module, args, output: seen.append(module.training))
    tuner = apo.APO(torch.optim.SGD(model.parameters(), lr=0.05), model, criterion=F.cross_entropy, interval=1)
    tuner.step(*networks.batches("norm-and-dropout", 1, dtype=torch.float32)[0])
    assert len(seen) >= 4
    assert set(seen) == {mode}
    assert model.training is mode


def test_parameters_outside_the_optimizer_never_move_and_get_no_gradient_from_meta_steps():
    model = networks.build("convolutions", torch.float32)
    outside = [p for layer in model[:4] for p in layer.parameters()]
    inside = [p for layer in model[4:] for p in layer.parameters()]
    before = [p.detach().clone() for p in outside]
    tuner = apo.APO(torch.optim.Adam(inside, lr=0.01), model, criterion=F.cross_entropy, interval=1)
    for x, y in networks.batches("convolutions", 3, dtype=torch.float32):
        for p in outside:
            p.grad = None
        tuner.backward(x, y)
        expected = [p.grad.clone() for p in outside]
        tuner.step()
        tuner.optimizer.zero_grad()
        assert all(torch.equal(p.grad, gradient) for p, gradient in zip(outside, expected, strict=True))
    assert len(tuner.history) == 3
    assert all(torch.equal(p, value) for p, value in zip(outside, before, strict=True))


def test_parameters_without_gradient_stay_where_they_are_and_without_gradient():
    model = Treacherous()
    idle = [*model.unused.parameters(), *model.frozen.parameters()]
    before = [p.detach().clone() for p in idle]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    tuner = apo.APO(optimizer, model, criterion=F.cross_entropy, interval=1)
    for x, y in networks.batches("norm-and-dropout", 3, dtype=torch.float32):
        tuner.step(x, y)
    assert all(torch.equal(p, value) and p.grad is None for p, value in zip(idle, before, strict=True))
    assert not any(p in optimizer.state for p in idle)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_gradient_of_zeros_at_theta_may_be_missing_at_the_look_ahead(dtype):
    model = Treacherous().to(dtype)
    for p in model.unused.parameters():
        p.grad = torch.zeros_like(p)  # what zero_grad(set_to_none=False) leaves
    tuner = apo.APO(torch.optim.SGD(model.parameters(), lr=0.01), model, criterion=F.cross_entropy, interval=1)
    tuner.backward(*networks.batches("norm-and-dropout", 1, dtype=dtype)[0])
    tuner.step()
    assert tuner.history[0].updated


def test_memory_and_randomness_of_the_user_are_untouched_by_the_warm_start():
    model = networks.build("norm-and-dropout", torch.float32)
    batch = networks.batches("norm-and-dropout", 1, dtype=torch.float32)[0]
    states = []
    for warm_start in (True, False):
        twin = copy.deepcopy(model)
        rule = apo.LearningRate(torch.optim.SGD(twin.parameters(), lr=1e-4), warm_start=warm_start)
        tuner = apo.APO(rule, twin, criterion=F.cross_entropy)
        torch.manual_seed(5)
        tuner.step(*batch)
        states.append(snapshot(twin))
    assert_same(*states)
