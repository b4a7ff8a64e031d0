from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from tests.lifecycle.harness import DOORS, RULES, Run, plain_network, sgdm
from torch import Tensor
from torch.optim import Adam, lr_scheduler

import apo

TERMS = ("loss", "look_ahead_loss", "fsd", "wsd", "objective", "meta_gradient_norm")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("door", DOORS)
def test_every_meta_step_leaves_a_record(door, rule):
    interval = 1 if rule == "kronecker warming up" else 3
    run = Run(door, rule).train(range(8))
    history = run.tuner.history
    assert [record.step for record in history] == list(range(0, 8, interval))
    for record in history:
        assert all(math.isfinite(getattr(record, term)) for term in TERMS)
        assert len(record.lr) == len(run.optimizer.param_groups)
    assert history[-1].lr == run.tuner.rule.rates()


@pytest.mark.parametrize("door", DOORS)
def test_the_terms_of_a_record_add_up(door):
    run = Run(door, fsd_weight=0.7, wsd_weight=0.2).train(range(8))
    for record in run.tuner.history:
        expected = record.look_ahead_loss + 0.7 * record.fsd + 0.2 * record.wsd
        assert record.objective == pytest.approx(expected, rel=1e-6)


def test_a_column_is_one_figure_over_time():
    run = Run("explicit", "rate and momentum").train(range(8))
    history = run.tuner.history
    assert history.column("loss") == [record.loss for record in history]
    assert history.column("lr/0") == [record.lr[0] for record in history]
    assert history.column("momentum") == [record.summary["momentum"] for record in history]
    with pytest.raises(KeyError):
        history.column("no such figure")


def test_the_history_keeps_the_latest_records():
    run = Run("explicit", interval=1, history_limit=3).train(range(8))
    assert [record.step for record in run.tuner.history] == [5, 6, 7]


@pytest.mark.parametrize("door", DOORS)
def test_listeners_hear_of_every_meta_step(door):
    first, second, third = [], [], []
    run = Run(door, on_meta_step=[first.append, second.append])
    run.train(range(4))
    run.tuner.on_meta_step(third.append)
    run.train(range(4, 8))
    assert first == second == list(run.tuner.history)
    assert third == list(run.tuner.history)[2:]
    single: list[apo.MetaStep] = []
    assert Run(door, on_meta_step=single.append).train(range(1)).tuner.history[0] == single[0]


def test_records_can_be_read_back_from_tensorboard(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        run = Run("attached", "kronecker", on_meta_step=apo.tensorboard(writer, prefix="run")).train(range(8))
    log = events.EventAccumulator(str(tmp_path)).Reload()
    assert set(log.Tags()["scalars"]) == {f"run/{name}" for name in run.tuner.history[0].scalars()}
    for name in run.tuner.history[0].scalars():
        written = log.Scalars(f"run/{name}")
        assert [event.step for event in written] == [0, 3, 6]
        assert [event.value for event in written] == pytest.approx(run.tuner.history.column(name), rel=1e-6, abs=1e-12)


# --- waiting for the device ---


@pytest.fixture
def host_reads(monkeypatch) -> Iterator[list[str]]:
    """Notes every call that would wait for an accelerator."""
    reads: list[str] = []

    def watch(name: str) -> None:
        original = getattr(Tensor, name)

        def wrapper(self: Tensor, *args, **kwargs):
            reads.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, wrapper)

    for name in ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "nonzero"):
        watch(name)
    yield reads


def reads_per_step(run: Run, reads: list[str], scheduler=None) -> list[int]:
    counts = []
    for index in range(9):
        inputs, target = run.batch(index)
        reads.clear()
        run.step(inputs, target)
        if scheduler is not None:
            scheduler.step()
        counts.append(len(reads))
    return counts


@pytest.mark.parametrize("rule", [*(name for name in RULES if "warming" not in name), "tensor lr"])
@pytest.mark.parametrize("door", DOORS)
def test_nothing_waits_for_the_device_between_meta_steps(door, rule, host_reads):
    def tensor_lr(model):
        return Adam(model.parameters(), lr=torch.tensor(1e-3), foreach=False, capturable=False)

    run = Run(door, tensor_lr if rule == "tensor lr" else rule, interval=4)
    counts = reads_per_step(run, host_reads)
    bare = bare_reads(run, host_reads)
    assert [count for index, count in enumerate(counts) if index % 4] == [bare] * 6
    assert counts[4] > bare  # so the watch works


def bare_reads(run: Run, reads: list[str]) -> int:
    """Count what torch's own optimizer reads (Adam on the CPU reads its step counter)."""
    run.tuner.detach()
    inputs, target = run.batch(0)
    run.optimizer.zero_grad()
    torch.nn.functional.cross_entropy(run.model(inputs), target).backward()
    reads.clear()
    run.optimizer.step()
    return len(reads)


def test_schedulers_do_not_make_it_wait_either(host_reads):
    run = Run("attached", interval=4)
    counts = reads_per_step(run, host_reads, lr_scheduler.StepLR(run.optimizer, 2))
    assert counts[1:4] == counts[5:8] == [0, 0, 0]


def test_gradient_accumulation_waits_for_nothing_between_meta_steps(host_reads):
    run = Run("attached", interval=4, fsd_batch="same")
    for index in range(4):
        inputs, target = run.batch(index)
        host_reads.clear()
        run.optimizer.zero_grad()
        for x, y in zip(inputs.chunk(4), target.chunk(4), strict=True):
            run.backward(x, y, weight=0.25)
        run.optimizer.step()
        assert (len(host_reads) > 0) == (index == 0)


# --- warnings ---


@pytest.mark.parametrize("door", DOORS)
def test_a_rate_at_its_bound_is_told_once(door):
    def rule(model):
        return apo.LearningRate(sgdm(model), bounds=(1e-6, 0.051), warm_start=False)

    run = Run(door, rule, interval=1)
    with pytest.warns(
        apo.ApoWarning, match=r"rate of param group 0 has reached its bound 0\.051: widen bounds"
    ) as seen:
        run.train(range(6))
    assert len(seen) == 1
    assert run.lr == pytest.approx(0.051)


@pytest.mark.parametrize("door", DOORS)
def test_a_meta_gradient_that_is_not_finite_skips_the_update_and_is_told_once(door):
    class Cliff(torch.nn.Module):
        """Finite at the weights in force, infinite at any other once armed."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.armed = plain_network(), False
            self.memory = SimpleNamespace(at=None)  # which apo does not put back

        def forward(self, inputs: Tensor) -> Tensor:
            weight = self.net[0].weight.detach()
            if self.training and self.memory.at is None:
                self.memory.at = weight.clone()
            moved = self.armed and not torch.equal(self.memory.at, weight)
            return self.net(inputs) * (math.inf if moved else 1.0)

    run = Run(door, network=Cliff, interval=1, fsd_batch="same")
    with pytest.warns(apo.ApoWarning, match="meta-gradient was not finite") as seen:
        for index in range(6):
            run.model.armed, run.model.memory.at = index >= 3, None
            before = run.tuner.rule.phi()[0].clone()
            weights = run.weights()
            run.step(*run.batch(index))
            assert torch.equal(before, run.tuner.rule.phi()[0]) == (index >= 3)
            assert not torch.equal(weights[0], run.weights()[0])  # training continues
    assert len(seen) == 1
    assert run.tuner.skipped_meta_updates == 3
    assert [record.updated for record in run.tuner.history] == [True] * 3 + [False] * 3
