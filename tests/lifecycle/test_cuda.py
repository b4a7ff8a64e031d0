"""What the tests beside this one claim on a CPU holds on a GPU: precision, loss scaling, fused steps, compilation."""

from __future__ import annotations

import contextlib
import shutil

import pytest
import torch
from tests.lifecycle.harness import CLASSES, DOORS, FEATURES, Run, plain_network
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

import apo

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
OVERFLOWS = {3, 10, 11, 25}  # of which 3 and, after the skipped one, 10 would have been meta-steps


def on_device() -> nn.Module:
    return plain_network().to(DEVICE)


def batch(run: Run, index: int) -> tuple[Tensor, Tensor]:
    inputs, target = run.batch(index)
    return inputs.to(DEVICE), target.to(DEVICE)


def train(run: Run, steps: int = 30, dtype: torch.dtype | None = None) -> Run:
    """Train in float32, or under autocast."""
    for index in range(steps):
        inputs, target = batch(run, index)
        run.optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=dtype) if dtype else contextlib.nullcontext():
            run.backward(inputs, target)
        run.update()
    return run


def assert_close_runs(one: Run, other: Run, tolerance: float = 1e-3) -> None:
    assert len(one.tuner.history) == len(other.tuner.history) > 5
    for name in ("lr/0", "loss"):
        assert one.tuner.history.column(name) == pytest.approx(other.tuner.history.column(name), rel=tolerance)
    torch.testing.assert_close(one.weights(), other.weights(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", ["sgdm", "adam", "kronecker"])
def test_both_doors_agree(rule):
    assert_close_runs(*(train(Run(door, rule, on_device)) for door in DOORS))


def test_a_gpu_learns_what_a_cpu_learns():
    here, there = Run("attached", "sgdm", plain_network), Run("attached", "sgdm", on_device)
    here.train(range(30))
    train(there)
    assert here.tuner.history.column("lr/0") == pytest.approx(there.tuner.history.column("lr/0"), rel=1e-2)


@pytest.mark.parametrize("door", DOORS)
def test_bfloat16_autocast_is_in_force_in_the_repeated_passes_and_trains(door):
    seen = []
    run = Run(door, "adam", on_device)
    run.model[0].register_forward_hook(lambda layer, args, output: seen.append(output.dtype))
    train(run, 60, torch.bfloat16)
    assert set(seen) == {torch.bfloat16} and len(seen) > 60
    assert run.tuner.history[-1].loss < 0.9 * run.tuner.history[0].loss


def scaled_training(run: Run, scaler: torch.amp.GradScaler, overflows: set[int]) -> list[int]:
    """Train in float16; return the steps that were not taken."""
    left_out = []
    for index in range(40):
        inputs, target = batch(run, index)
        inputs = inputs * 1e38 if index in overflows else inputs
        before = run.weights()
        with torch.autocast(DEVICE, dtype=torch.float16):
            if isinstance(run.tuner, apo.APO):
                run.tuner.step(inputs, target)
            else:
                run.optimizer.zero_grad()
                scaler.scale(run.criterion(run.model(inputs), target)).backward()
                scaler.step(run.optimizer)
                scaler.update()
        if all(torch.equal(new, old) for new, old in zip(run.weights(), before, strict=True)):
            left_out.append(index)
    return left_out


@pytest.mark.parametrize(
    "rule",
    [
        lambda model: SGD(model.parameters(), lr=1e-3, momentum=0.9),
        lambda model: Adam(model.parameters(), lr=1e-3),
        lambda model: Adam(model.parameters(), lr=1e-3, fused=True),
        lambda model: apo.Kronecker(model, lr=0.05),
    ],
    ids=["sgd", "adam", "fused adam", "kronecker"],
)
@pytest.mark.parametrize("door", DOORS)
def test_forced_overflows_skip_exactly_those_steps(door, rule):
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=1000)
    run = Run(door, rule, on_device, scaler=scaler)
    assert scaled_training(run, scaler, OVERFLOWS) == sorted(OVERFLOWS)
    assert scaler.get_scale() == 2.0**6
    assert run.tuner.skipped_meta_updates == 0
    assert run.tuner.history[-1].loss < 0.9 * run.tuner.history[0].loss


@pytest.mark.parametrize(
    "plain, special",
    [
        (lambda p: SGD(p, lr=0.05, momentum=0.9), lambda p: SGD(p, lr=0.05, momentum=0.9, fused=True)),
        (lambda p: AdamW(p, lr=1e-3), lambda p: AdamW(p, lr=1e-3, fused=True)),
        (lambda p: AdamW(p, lr=1e-3), lambda p: AdamW(p, lr=1e-3, capturable=True)),
        (lambda p: AdamW(p, lr=1e-3), lambda p: AdamW(p, lr=1e-3, foreach=True)),
    ],
    ids=["fused sgd", "fused adamw", "capturable adamw", "foreach adamw"],
)
@pytest.mark.parametrize("door", DOORS)
def test_other_implementations_of_an_optimizer_learn_the_same(door, plain, special):
    runs = [Run(door, lambda model, make=make: make(model.parameters()), on_device) for make in (plain, special)]
    assert_close_runs(*map(train, runs))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("door", DOORS)
def test_a_compiled_network_learns_what_the_original_learns(door, backend):
    if backend == "inductor" and DEVICE == "cuda":
        pytest.importorskip("triton")
        if shutil.which("gcc") is None and shutil.which("cc") is None:
            pytest.skip("triton needs a C compiler")
    torch.compiler.reset()
    compiled = Run(door, "sgdm", lambda: torch.compile(on_device(), backend=backend))
    assert_close_runs(train(compiled), train(Run(door, "sgdm", on_device)))


@pytest.mark.parametrize("door", DOORS)
def test_the_look_ahead_sees_the_dropout_masks_of_the_training_pass(door):
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 64), nn.Dropout(0.5), nn.Linear(64, CLASSES)).to(DEVICE)

    def tiny_steps(model: nn.Module) -> apo.Rule:
        return apo.LearningRate(SGD(model.parameters(), lr=1e-9), warm_start=False)

    run = train(Run(door, tiny_steps, network, interval=1), 5)
    assert run.tuner.history.column("look_ahead_loss") == pytest.approx(run.tuner.history.column("loss"), rel=1e-4)
