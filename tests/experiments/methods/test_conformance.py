"""Every method builds, lowers the loss, resumes bit for bit and reports a rate."""

from __future__ import annotations

import math

import pytest
import torch
from tests.experiments.methods.conformance import (
    STEPS,
    build,
    classification,
    regression,
    saved_and_loaded,
    take_steps,
    tiny_loss,
)

import apo_experiments.methods as methods

# Overrides that suit a tiny problem and a short run; a method that is not listed runs with its defaults.
OVERRIDES: dict[str, dict[str, object]] = {
    "rmsprop": {"lr": 3e-3},
    "adam": {"lr": 1e-2},
    "adamw": {"lr": 1e-2},
    "nadam": {"lr": 1e-2},
    "muon": {"lr": 3e-2, "adamw_lr": 1e-2},
    "kfac": {"lr": 0.03, "statistics_interval": 3, "inverse_interval": 6},
    "ekfac": {"lr": 0.03, "statistics_interval": 3, "inverse_interval": 6},
    "shampoo": {"lr": 0.03, "inverse_interval": 5, "start_step": 10},
    "soap": {"lr": 1e-2},
    "psgd-kron": {"lr": 1e-2},
    "schedule-free-sgd": {"lr": 0.5},
    "schedule-free-adamw": {"lr": 1e-2},
    "prodigy": {"d0": 1e-3},
    "nadamw": {"lr": 1e-2},
    "d-adaptation": {"d0": 1e-2},
    "schedule-free-sgd-warm": {"lr": 0.5},
    "schedule-free-adamw-warm": {"lr": 1e-2},
    "dog": {"reps_rel": 1e-2},
    "apo-precond": {"lr": 0.3, "warmup_steps": 15, "warmup_interval": 1, "interval": 3},
    "apo-precond-full": {"lr": 0.05, "interval": 3, "wsd_weight": 0.3},
    "apo-eigen": {"interval": 3},
    "apo-precond-diagonal": {"lr": 0.05, "interval": 3},
    "apo-rate-momentum": {"interval": 3},
}
ALL = pytest.mark.parametrize("name", list(methods.METHODS))


def made(name: str, problem, **more: object):
    if needs := methods.METHODS[name].needs:
        pytest.importorskip(needs[0])
    if name in ("muon", "muon-apo-untuned") and not hasattr(torch.optim, "Muon"):
        pytest.skip("needs a torch with Muon")
    return build(name, problem, OVERRIDES.get(name, {}) | more)


@ALL
@pytest.mark.parametrize("problem", [classification, regression])
def test_loss_falls_within_sixty_steps(name, problem):
    task = problem()
    before = tiny_loss(task)
    stepper = made(name, task)
    losses = take_steps(stepper, task, STEPS)
    assert all(not loss.requires_grad and loss.ndim == 0 for loss in losses)
    assert tiny_loss(task) < 0.7 * before


@ALL
@pytest.mark.parametrize("schedule", ["fixed", "cosine"])
def test_resume_is_bit_exact(name, schedule):
    task = classification()
    stepper = made(name, task, schedule=schedule, weight_decay=1e-3)
    take_steps(stepper, task, 25)
    saved = saved_and_loaded(stepper, task)
    expected = take_steps(stepper, task, 13)
    twin_task = classification(seed=5)
    twin_task.batches._batches = task.batches._batches  # type: ignore[attr-defined]
    twin = made(name, twin_task, schedule=schedule, weight_decay=1e-3)
    take_steps(twin, twin_task, 3)  # a run of its own, of which nothing may remain
    twin_task.model.load_state_dict(saved["model"])
    twin_task.batches.load_state_dict(saved["batches"])
    twin.load_state_dict(saved["stepper"])
    torch.set_rng_state(saved["random"])
    found = take_steps(twin, twin_task, 13)
    assert [loss.item() for loss in found] == [loss.item() for loss in expected]
    assert twin.rate() == stepper.rate()
    for key, value in task.model.state_dict().items():
        assert torch.equal(value, twin_task.model.state_dict()[key]), key


@ALL
def test_rate_and_telemetry_are_finite(name):
    task = classification()
    stepper = made(name, task)
    take_steps(stepper, task, 11)
    assert math.isfinite(stepper.rate()) and stepper.rate() > 0
    assert all(isinstance(key, str) and math.isfinite(value) for key, value in stepper.telemetry().items())


@ALL
def test_clipping_and_bf16_autocast_work(name):
    task = classification()
    before = tiny_loss(task)
    stepper = made(name, task, clip_grad_norm=5.0, precision="bf16-autocast")
    take_steps(stepper, task, STEPS)
    assert tiny_loss(task) < before
    assert all(p.dtype == torch.float32 for p in task.model.parameters())


@pytest.mark.parametrize("name", ["sgdm", "adam", "kfac", "ekfac", "sgdm-apo", "adam-apo", "apo-precond", "apo-eigen"])
def test_16_bit_network_trains(name):
    task = classification(dtype=torch.bfloat16)
    before = tiny_loss(task)
    stepper = made(name, task, precision="bf16")
    take_steps(stepper, task, STEPS)
    assert tiny_loss(task) < before
    assert all(p.dtype == torch.bfloat16 for p in task.model.parameters())


@ALL
def test_names_agree_and_there_is_a_summary(name):
    method = methods.METHODS[name]
    assert method.name == name and method.summary and "\n" not in method.summary


@ALL
def test_weight_decay_takes_part(name):
    weights = []
    for decay in (0.0, 0.3):
        task = regression()
        take_steps(made(name, task, weight_decay=decay), task, 8)
        weights.append(torch.cat([p.detach().flatten() for p in task.model.parameters()]))
    assert not torch.equal(*weights)
