"""Warm-up, deferred steps, checkpoints, copies, and what is refused."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from tests.preconditioners.conformance import randomised
from tests.preconditioners.test_step import assert_same_weights, train, twins
from tests.preconditioners.zoo import backward, build
from torch import nn

from apo.preconditioners import Diagonal, Eigenbasis, Full, Kronecker, Preconditioner


def with_warmup(model, steps=2, **options) -> Kronecker:
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Kronecker(model, lr=0.1, warmup=sgd, warmup_steps=steps, **options)


def saved_and_loaded(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# --- warm-up ---


def test_warmup_moves_the_weights_for_its_steps_and_then_p_does():
    model, twin, batch = twins()
    optimizer = with_warmup(model)
    seen = []
    for _ in range(4):
        seen.append((optimizer.warming_up, optimizer.warmup_elapsed))
        train(model, optimizer, batch, steps=1)
    assert seen == [(True, False), (True, False), (False, True), (False, True)]
    assert optimizer.steps == 4
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9), batch, steps=2)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.09), batch, steps=2)
    assert_same_weights(model, twin)


def test_look_ahead_during_warmup_is_that_of_p():
    model, batch = build("mlp")
    optimizer = with_warmup(model)
    backward(model, batch)
    for p, displacement in zip(optimizer.moved(), optimizer.displacement(), strict=True):
        torch.testing.assert_close(displacement, -0.1 * p.grad)


def test_a_guarded_warmup_lasts_until_it_is_handed_over():
    model, batch = build("mlp")
    optimizer = with_warmup(model)
    optimizer.wait_for_hand_over(True)
    train(model, optimizer, batch, steps=3)
    assert optimizer.warming_up and optimizer.warmup_elapsed
    optimizer.hand_over()
    assert not optimizer.warming_up


def test_handing_over_early_ends_the_warmup():
    model, batch = build("mlp")
    optimizer = with_warmup(model, steps=100)
    optimizer.hand_over()
    before = model[0].weight.detach().clone()
    backward(model, batch)
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), before - 0.09 * model[0].weight.grad)


# --- deferred steps ---


def test_a_deferred_step_evaluates_the_closure_and_moves_nothing_until_it_is_taken():
    model, twin, batch = twins()
    optimizer = Kronecker(model, lr=0.1)
    calls = []

    def closure():
        calls.append(None)
        backward(model, batch)
        return 5.0

    with optimizer.deferring():
        assert optimizer.deferred
        assert optimizer.step(closure) == 5.0
        assert optimizer.step() is None
    assert not optimizer.deferred
    assert len(calls) == 1 and optimizer.steps == 0
    assert_same_weights(model, twin, tolerance=0)
    optimizer.take_step()
    assert optimizer.steps == 1
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.09), batch, steps=1)
    assert_same_weights(model, twin)


def test_a_step_that_fails_is_deferred_no_longer():
    optimizer = Kronecker(nn.Linear(2, 2))
    with pytest.raises(ZeroDivisionError), optimizer.deferring():
        optimizer.step(lambda: 1 / 0)
    assert not optimizer.deferred


def test_a_taken_step_uses_factors_that_moved_after_the_displacement():
    theta = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = Diagonal(theta, lr=0.1, scale=1.0)
    theta.grad = torch.ones_like(theta)
    optimizer.displacement()
    optimizer.factors()[0].fill_(2.0)
    optimizer.take_step()
    assert theta.item() == pytest.approx(-0.4)


# --- checkpoints ---


def make(final: type[Preconditioner], model: nn.Module, warm: bool) -> Preconditioner:
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    warmup = {"warmup": sgd, "warmup_steps": 4} if warm else {}
    return final(model, 0.05, momentum=0.9, weight_decay=0.01, **warmup)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("final", [Full, Diagonal, Kronecker, Eigenbasis])
def test_resumes_bit_exactly(final, dtype, warm):
    model = build("mlp")[0].to(dtype)
    batch = torch.randn(6, 4, dtype=dtype)
    optimizer = make(final, model, warm)
    for layer in optimizer.layers:
        randomised(layer.block)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    train(model, optimizer, batch, steps=3, scheduler=scheduler)
    checkpoint = saved_and_loaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, batch, steps=3)

    torch.manual_seed(7)
    fresh = build("mlp")[0].to(dtype)
    resumed = make(final, fresh, warm)
    held = resumed.factors()
    fresh.load_state_dict(checkpoint["model"])
    resumed.load_state_dict(checkpoint["optimizer"])
    train(fresh, resumed, batch, steps=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(optimizer.factors(), held, strict=True))
    assert all(a is b for a, b in zip(resumed.factors(), held, strict=True))
    assert resumed.steps == 6


def test_handing_over_is_remembered():
    model, _ = build("mlp")
    optimizer = with_warmup(model, steps=10)
    optimizer.hand_over()
    state = saved_and_loaded(optimizer.state_dict())
    resumed = with_warmup(model, steps=10)
    resumed.load_state_dict(state)
    assert not resumed.warming_up


def test_loading_does_not_share_memory_with_what_was_loaded():
    model, batch = build("mlp")
    optimizer = Kronecker(model, momentum=0.9)
    train(model, optimizer, batch, steps=1)
    state = saved_and_loaded(optimizer.state_dict())
    reference = copy.deepcopy(state)
    optimizer.load_state_dict(state)
    train(model, optimizer, batch, steps=2)
    for factor in optimizer.factors():
        factor.add_(1.0)
    for key, entry in reference["state"].items():
        assert torch.equal(state["state"][key]["momentum_buffer"], entry["momentum_buffer"])
    for name, factors in reference["preconditioner"]["factors"].items():
        for key, factor in factors.items():
            assert torch.equal(state["preconditioner"]["factors"][name][key], factor)


def test_loading_refuses_what_belongs_to_another_optimizer_and_changes_nothing():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = Kronecker(model, lr=0.1)
    before = copy.deepcopy(optimizer.state_dict())
    others = {
        "no entry 'preconditioner'": torch.optim.SGD(model.parameters(), lr=1.0),
        "in the optimizer alone": Kronecker(model[0]),
        "got '0.bias' in state_dict alone": Diagonal(model),
        "must have factors .* for layer": Kronecker(model, lr=1.0, max_dim=2),
        "differ in warmup": with_warmup(model),
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(other.state_dict())
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    for name, factors in before["preconditioner"]["factors"].items():
        for key, factor in factors.items():
            assert torch.equal(optimizer.state_dict()["preconditioner"]["factors"][name][key], factor)


# --- copies ---


@pytest.mark.parametrize("trained", [0, 3])
def test_deepcopy_is_independent_and_goes_on_alike(trained):
    model, batch = build("mlp")
    optimizer = with_warmup(model, momentum=0.9)
    for layer in optimizer.layers:
        randomised(layer.block)
    train(model, optimizer, batch, steps=trained)
    twin, copied = copy.deepcopy((model, optimizer))
    originals = {id(p) for p in model.parameters()} | {id(f) for f in optimizer.factors()}
    owned = [p for layer in copied.layers for p in layer.params] + copied.factors()
    owned += [p for group in copied.warmup.param_groups for p in group["params"]]
    assert not originals & {id(tensor) for tensor in owned}
    train(twin, copied, batch, steps=4)
    train(model, optimizer, batch, steps=4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert copied.steps == trained + 4


# --- inspection ---


def test_dense_preconditioner_is_the_users_rate_times_identity_at_first():
    optimizer = Kronecker(nn.Linear(2, 2).double(), lr=0.25)
    (dense,) = optimizer.to_dense().values()
    torch.testing.assert_close(dense, 0.25 * torch.eye(6, dtype=torch.float64))
    assert {name: float(value) for name, value in optimizer.summary().items()} == {"weight": 1.0}
    with pytest.raises(ValueError, match="pass one of weight"):
        optimizer.dense_preconditioner("bias")


# --- refusals ---


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"lr": 0.0}, ValueError, "lr must be a positive number, got 0.0"),
        ({"lr": float("nan")}, ValueError, "lr must be .*, got nan"),
        ({"lr": torch.tensor(0.1)}, TypeError, "lr must be a positive number, got Tensor"),
        ({"scale": -1.0}, ValueError, "scale must be .*, got -1.0"),
        ({"momentum": 1.0}, ValueError, "momentum must be a number of at least 0 and below 1, got 1.0"),
        ({"clip": 0.0}, ValueError, "clip must be a positive number or None, got 0.0"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay must be .*, got -0.1"),
        ({"warmup_steps": 5}, ValueError, "warmup must be an optimizer if warmup_steps is 5, got None"),
        ({"warmup_steps": -5}, ValueError, "warmup_steps must be .*, got -5"),
        ({"warmup": "sgd", "warmup_steps": 5}, TypeError, "warmup must be .*, got str"),
        ({"conv": "dense"}, ValueError, "conv must be .*, got 'dense'"),
        ({"matmul": "float16"}, ValueError, "matmul must be .*, got 'float16'"),
    ],
)
def test_refuses_options_that_make_no_sense(options, error, message):
    with pytest.raises(error, match=message):
        Kronecker(nn.Linear(2, 2), **options)


def test_refuses_options_of_a_group_that_make_no_sense():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"lr must be .*, got -1\.0"):
        Kronecker(model, params=[{"params": model.parameters(), "lr": -1.0}])


def test_refuses_a_warmup_over_other_parameters():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="warmup must have the preconditioner's parameters"):
        Kronecker(model, warmup=torch.optim.SGD([model.weight], lr=0.1), warmup_steps=3)


def test_refuses_a_group_that_comes_later():
    optimizer = Kronecker(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="build a new one"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_refuses_to_ignore_a_parameter_that_was_put_into_a_group_later():
    model, extra = nn.Linear(3, 2), nn.Parameter(torch.ones(2))
    optimizer = Kronecker(model)
    optimizer.param_groups[0]["params"].append(extra)
    (model(torch.ones(4, 3)) * extra).sum().backward()
    with pytest.raises(RuntimeError, match="a parameter of shape"):
        optimizer.step()


def test_refuses_to_ignore_a_parameter_that_was_unfrozen_later():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer = Kronecker(model, params=model.parameters())
    model.bias.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="unfreeze it before"):
        optimizer.step()


def test_full_refuses_large_models_unless_asked():
    with pytest.raises(ValueError, match="max_dim must be at least the number of parameters, 110"):
        Full(nn.Linear(10, 10), max_dim=100)
    assert Full(nn.Linear(10, 10), max_dim=110).factors()[0].shape == (110, 110)


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Preconditioner(nn.Linear(2, 2), 0.1)
