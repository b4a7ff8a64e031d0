"""What steers training is the same everywhere: drift is found, and what one process has to skip, all skip."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.distributed.processes import in_processes
from tests.distributed.training import build, network, outcome, rate, share_of_batch, train, weights, wrap
from torch import nn

import apo
from apo.distributed import Processes

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def _drift(rule: str) -> str:
    tuner = build(rule, "ddp")
    train(tuner, 0, 10)
    tuner.rule.phi()[0].add_(0.01 * dist.get_rank())
    try:
        train(tuner, 10, 12)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_phi_that_drifts_apart_is_an_error_on_every_process(tmp_path):
    for rule in ("rate", "kronecker"):
        messages = in_processes(2, tmp_path / rule, _drift, rule)
        assert all("meta-parameters differ between the processes at step 10" in message for message in messages)


def _one_process_sees_infinity(wrapper: str) -> tuple[int, bool, float]:
    """The look-ahead of one process alone is not finite: its B' is."""
    tuner = build("rate", wrapper)
    train(tuner, 0, 10)
    x, y = share_of_batch(9)
    if dist.get_rank() == 1:
        (previous,) = tuner.fsd_batches._previous
        previous.calls[0].args[0].fill_(float("inf"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuner.step(x, y)
    finite = all(bool(torch.isfinite(p).all()) for p in weights(tuner.model))
    return tuner.skipped_meta_updates, finite, float(tuner.rule.phi()[0])


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_look_ahead_that_is_not_finite_on_one_process_is_skipped_by_all(wrapper, tmp_path):
    first, second = in_processes(2, tmp_path, _one_process_sees_infinity, wrapper)
    assert first == second and first[:2] == (1, True)


def _two_losses_whose_weights_are_halves_by_chance() -> tuple[list[float], bool]:
    """On one process alone, and at some steps, the weights of two losses are those of two micro-batches."""
    model = wrap(network(), "ddp")
    optimizer, criterion = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), nn.MSELoss()
    tuner = apo.attach(optimizer, model, criterion, interval=2)
    for step in range(12):
        x, y = share_of_batch(step)
        by_chance = dist.get_rank() == 1 and step in (0, 3, 6, 7)
        part = 0.5 if by_chance else 0.25
        optimizer.zero_grad()
        (part * criterion(model(x), y)).backward()
        ((1 - part) * criterion(model(2 * x), y)).backward()
        optimizer.step()
    return tuner.history.column("lr/0"), bool(torch.isfinite(weights(model)[0]).all())


def test_processes_that_see_different_kinds_of_losses_run_the_same_passes(tmp_path):
    first, second = in_processes(2, tmp_path, _two_losses_whose_weights_are_halves_by_chance)
    assert first == second and first[1]


OVERFLOWS = {3, 10, 11, 25}  # step 10 would have been a meta-step


def _scaled_training(wrapper: str, door: str, overflow_on: int) -> tuple[list[int], int, bool, list[float]]:
    """Train with a GradScaler; at some steps the gradients of one process overflow."""
    model = wrap(network(), wrapper)
    # CPU autocast knows no float16 scaler of its own: the scale is what counts here.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    optimizer, criterion = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), nn.MSELoss()
    rank = dist.get_rank()
    explicit = apo.APO(optimizer, model, criterion=F.mse_loss, scaler=scaler) if door == "explicit" else None
    tuner = explicit or apo.attach(optimizer, model, criterion, scaler=scaler)
    skipped = []
    for step in range(40):
        x, y = share_of_batch(step)
        if step in OVERFLOWS and rank == overflow_on:
            y = y * 1e38
        before, scale = tuner.steps, scaler.get_scale()
        if explicit is not None:
            explicit.step(x, y)
        else:
            optimizer.zero_grad()
            scaler.scale(criterion(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        if tuner.steps == before:
            skipped.append(step)
            assert scaler.get_scale() == scale / 2
    finite = all(bool(torch.isfinite(p).all()) for p in weights(model))
    return skipped, tuner.skipped_meta_updates, finite, [r.loss for r in tuner.history]


@pytest.mark.parametrize("wrapper, door", [("ddp", "explicit"), ("ddp", "attach"), ("fsdp", "explicit")])
def test_an_overflow_on_one_process_skips_exactly_that_step_on_all(wrapper, door, tmp_path):
    first, second = in_processes(2, tmp_path, _scaled_training, wrapper, door, 1)
    assert first == second
    skipped, skipped_meta_updates, finite, losses = first
    assert skipped == sorted(OVERFLOWS) and skipped_meta_updates == 0 and finite
    assert losses[-1] < losses[0] < 10


def _gradients_in_buckets() -> bool:
    plain, viewing = build("kronecker", "ddp"), build("kronecker", "ddp", gradient_as_bucket_view=True)
    train(plain, 0, 30)
    train(viewing, 0, 30)
    return all(torch.equal(a, b) for a, b in zip(weights(plain.model), weights(viewing.model), strict=True))


def test_gradients_that_lie_in_the_buckets_of_ddp_survive_the_look_ahead(tmp_path):
    assert in_processes(2, tmp_path, _gradients_in_buckets) == [True, True]


class _PartlyUsed(nn.Module):
    """A network with a branch that the first process never uses, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch, self.idle = network(), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trunk(x) + (self.branch(x) if dist.get_rank() else 0.0)


def _unused_parameters(static: bool) -> tuple[list, bool, list]:
    torch.manual_seed(0)
    model: nn.Module = network() if static else _PartlyUsed()
    options = {"static_graph": True} if static else {"find_unused_parameters": True}
    wrapped = wrap(model, "ddp", **options)
    tuner = apo.APO(rate(wrapped), wrapped, criterion=F.mse_loss, interval=3)
    train(tuner, 0, 20)
    moved = static or not torch.equal(model.idle.weight, _PartlyUsed().idle.weight)
    return [r.lr for r in tuner.history], bool(moved), [p.sum().item() for p in weights(wrapped)]


def test_unused_parameters_and_static_graphs_of_ddp_work(tmp_path):
    for static in (False, True):
        first, second = in_processes(2, tmp_path / str(static), _unused_parameters, static)
        assert first == second and len(first[0]) == 7


def _accumulate(attached: bool, wrapper: str) -> dict:
    """Two micro-batches a step, whose gradients travel once."""
    model = wrap(network(), wrapper)
    criterion = nn.MSELoss()
    tuner = apo.attach(rate(model), model, criterion) if attached else apo.APO(rate(model), model, criterion=F.mse_loss)
    for step in range(30):
        x, y = share_of_batch(step)
        tuner.optimizer.zero_grad()
        for index, (part, target) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            waits = index == 0
            if wrapper == "fsdp":
                model.set_requires_gradient_sync(not waits)  # type: ignore[operator]
            with model.no_sync() if waits and wrapper == "ddp" else contextlib.nullcontext():  # type: ignore[operator]
                if isinstance(tuner, apo.APO):
                    tuner.backward(part, target, weight=0.5)
                else:
                    (criterion(model(part), target) / 2).backward()
        tuner.step() if isinstance(tuner, apo.APO) else tuner.optimizer.step()
    return {"weights": weights(model), "loss": [r.loss for r in tuner.history]}


def _accumulate_everywhere() -> list[dict]:
    return [_accumulate(attached, wrapper) for attached in (False, True) for wrapper in ("ddp", "fsdp")]


def test_accumulated_micro_batches_without_synchronisation_are_one_batch(tmp_path):
    model = network()
    tuner = apo.APO(rate(model), model, criterion=F.mse_loss, fsd_weight=0.3)
    train(tuner, 0, 1)  # one process, whole batches: the first loss is the global one
    for results in in_processes(2, tmp_path, _accumulate_everywhere):
        first, *others = results
        for other in others:
            torch.testing.assert_close(other["weights"], first["weights"], rtol=0, atol=1e-6)
        assert first["loss"][0] == pytest.approx(tuner.history[0].loss, rel=1e-6)


def _clear_on_one_process() -> tuple[bool, bool]:
    """One process's shard of the only gradient is zero, another's is not."""
    tuner = build("rate", "fsdp")
    tuner.backward(*share_of_batch(0))
    parameter, *others = tuner.model.parameters()
    for other in others:
        other.grad = None
    parameter.grad.to_local().fill_(float(dist.get_rank()))  # type: ignore[union-attr]
    before = tuner._gradients_are_clear()
    parameter.grad.to_local().zero_()  # type: ignore[union-attr]
    return before, tuner._gradients_are_clear()


def test_gradients_are_clear_for_all_processes_or_for_none(tmp_path):
    assert in_processes(2, tmp_path, _clear_on_one_process) == [(False, True)] * 2


def test_a_process_alone_agrees_with_itself():
    alone = Processes()
    assert alone.agree(torch.tensor(1.5)) == 1.5
    assert outcome(build("rate", "plain"))["records"] == []
