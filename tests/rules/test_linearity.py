"""Optimizers whose step is linear in their rate are accepted, all others refused by name and with a reason."""

import pytest
import torch

import apo
from apo.rules.linearity import check_linear_in_lr

ACCEPTED = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"amsgrad": True}),
    ("Adam", {"lr": torch.tensor(0.1)}),
    ("Adam", {"fused": True}),
    ("AdamW", {"weight_decay": 0.1, "amsgrad": True}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("Adamax", {}),
    ("Muon", {"weight_decay": 0.1}),
]
REFUSED = ["ASGD", "Rprop", "LBFGS", "Adafactor", "SparseAdam"]


def build(name, **options):
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    weights = torch.nn.Parameter(torch.randn(3, 4))
    return getattr(torch.optim, name)([weights], **({"lr": 0.1} | options))


@pytest.mark.parametrize(("name", "options"), ACCEPTED, ids=[f"{name}-{'-'.join(o)}" for name, o in ACCEPTED])
def test_linear_optimizers_are_accepted(name, options):
    rule = apo.LearningRate(build(name, **options))
    assert rule.rates() == pytest.approx((0.1,))


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name(name):
    with pytest.raises(apo.NotLinearError, match=f"{name} (is not|could not).*use SGD, Adam, AdamW"):
        apo.LearningRate(build(name))


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_maximize_is_refused_with_advice(name):
    with pytest.raises(apo.NotLinearError, match=f"{name} has maximize=True.*minimise the negative"):
        apo.LearningRate(build(name, maximize=True))


def test_maximize_in_a_later_group_is_noticed():
    optimizer = build("SGD")
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "maximize": True})
    with pytest.raises(apo.NotLinearError, match="SGD has maximize=True"):
        apo.LearningRate(optimizer)


class Square(torch.optim.SGD):
    """Moves by the square of its rate."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] ** 2 * p.grad)


class Sign(torch.optim.SGD):
    """Somebody else's optimizer, linear in its rate."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.sign())


def test_an_optimizer_of_ones_own_is_judged_by_what_it_does():
    parameters = [torch.nn.Parameter(torch.ones(2))]
    check_linear_in_lr(Sign(parameters, lr=0.1))
    with pytest.raises(apo.NotLinearError, match="the step of Square is not proportional to its lr"):
        check_linear_in_lr(Square(parameters, lr=0.1))


def test_the_check_can_be_left_out():
    assert apo.LearningRate(build("Rprop"), check_linear=False).rates() == (pytest.approx(0.1),)


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "Muon"])
def test_the_probe_leaves_the_optimizer_its_parameters_and_the_random_stream_alone(name):
    optimizer = build(name)
    weights = optimizer.param_groups[0]["params"][0]
    weights.grad = torch.ones_like(weights)
    optimizer.step()
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    before, random = weights.detach().clone(), torch.get_rng_state()
    state = {key: torch.as_tensor(value).clone() for key, value in optimizer.state[weights].items()}
    rates = [group["lr"] for group in optimizer.param_groups]
    check_linear_in_lr(optimizer)
    assert torch.equal(weights, before)
    assert torch.equal(weights.grad, torch.ones_like(weights))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(torch.as_tensor(optimizer.state[weights][key]), value) for key, value in state.items())
    assert [group["lr"] for group in optimizer.param_groups] == rates
    assert calls == []


def test_the_probe_works_with_a_scheduler_at_work():
    optimizer = build("SGD", momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    before = scheduler.last_epoch, optimizer._opt_called if hasattr(optimizer, "_opt_called") else None
    check_linear_in_lr(optimizer)
    assert (scheduler.last_epoch, getattr(optimizer, "_opt_called", None)) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop"])
def test_every_precision_is_accepted(name, dtype):
    optimizer = getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(2, 2, dtype=dtype))], lr=0.1)
    check_linear_in_lr(optimizer)


def test_state_made_by_the_constructor_is_part_of_the_probe():
    """Adagrad of older torch makes its state when it is built, and cannot step without."""
    optimizer = build("Adagrad")
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {"step": torch.tensor(0.0), "sum": torch.full_like(parameter, 0.1)}
    check_linear_in_lr(optimizer)


def test_an_optimizer_in_the_middle_of_training_is_accepted_and_left_alone():
    optimizer = build("Adam")
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = {key: value.clone() for key, value in optimizer.state[parameter].items()}
    check_linear_in_lr(optimizer)
    assert all(torch.equal(optimizer.state[parameter][key], value) for key, value in before.items())
