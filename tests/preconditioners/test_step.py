"""What a preconditioner does to the weights: with P = I it is SGD, and every option is torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.preconditioners.conformance import randomised
from tests.preconditioners.zoo import ZOO, backward, build
from torch import nn

from apo.preconditioners import Diagonal, Full, Kronecker

FINALS = [Full, Diagonal, Kronecker]


def train(model, optimizer, batch, steps=4, scheduler=None):
    for _ in range(steps):
        backward(model, batch)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def twins(name="mlp"):
    model, batch = build(name)
    return model, copy.deepcopy(model), batch


def assert_same_weights(one, other, tolerance=1e-12):
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("final", FINALS)
@pytest.mark.parametrize(
    "ours, torchs",
    [
        ({}, {}),
        ({"momentum": 0.9}, {"momentum": 0.9}),
        ({"weight_decay": 0.1}, {"weight_decay": 0.1}),
        ({"momentum": 0.5, "weight_decay": 0.1}, {"momentum": 0.5, "weight_decay": 0.1}),
    ],
)
def test_identity_is_sgd(final, ours, torchs):
    model, twin, batch = twins()
    train(model, final(model, lr=0.1, **ours), batch)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.09, **torchs), batch)
    assert_same_weights(model, twin)


@pytest.mark.parametrize("conv", ["matrix", "factored"])
@pytest.mark.parametrize("name", ZOO)
def test_identity_is_sgd_on_every_model(name, conv):
    model, twin, batch = twins(name)
    train(model, Kronecker(model, lr=0.1, scale=1.0, conv=conv), batch)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), batch)
    assert_same_weights(model, twin)


def test_decoupled_weight_decay_shrinks_weights_as_adamw_does():
    model, twin, batch = twins()
    train(model, Kronecker(model, lr=0.1, weight_decay=0.3, decoupled_weight_decay=True), batch)
    sgd = torch.optim.SGD(twin.parameters(), lr=0.09)
    for _ in range(4):
        backward(twin, batch)
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(1 - 0.1 * 0.3)
        sgd.step()
    assert_same_weights(model, twin)


def test_coupled_weight_decay_passes_through_p_and_decoupled_does_not():
    for decoupled, expected in [(False, 1.0 - 0.1 * 4.0 * (2.0 + 0.5)), (True, 1.0 - 0.1 * 4.0 * 2.0 - 0.1 * 0.5)]:
        theta = nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = Diagonal(theta, 0.1, scale=1.0, weight_decay=0.5, decoupled_weight_decay=decoupled)
        optimizer.factors()[0].fill_(2.0)
        theta.grad = torch.full_like(theta, 2.0)
        optimizer.step()
        assert theta.item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("final", FINALS)
def test_a_step_is_scale_times_the_displacement(final):
    model, batch = build("mlp")
    optimizer = final(model, lr=0.2, scale=0.7)
    for layer in optimizer.layers:
        randomised(layer.block)
    backward(model, batch)
    before, displacement = [p.detach().clone() for p in optimizer.moved()], optimizer.displacement()
    optimizer.step()
    for p, start, delta in zip(optimizer.moved(), before, displacement, strict=True):
        torch.testing.assert_close(p.detach() - start, 0.7 * delta, rtol=1e-12, atol=1e-13)


def test_schedulers_compose():
    model, twin, batch = twins()
    ours = Kronecker(model, lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.09, momentum=0.9)
    for network, optimizer in ((model, ours), (twin, theirs)):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        train(network, optimizer, batch, scheduler=scheduler)
    assert_same_weights(model, twin)
    assert ours.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)
    assert ours.param_groups[0]["initial_step"] == 0.1


@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CosineAnnealingLR", "ReduceLROnPlateau"])
def test_torchs_schedulers_accept_it(scheduler):
    model, batch = build("mlp")
    optimizer = Kronecker(model, lr=0.1, momentum=0.9)
    options = {"OneCycleLR": {"max_lr": 0.2, "total_steps": 10}, "CosineAnnealingLR": {"T_max": 5}}
    schedule = getattr(torch.optim.lr_scheduler, scheduler)(optimizer, **options.get(scheduler, {}))
    backward(model, batch)
    optimizer.step()
    schedule.step(*([1.0] if scheduler == "ReduceLROnPlateau" else []))
    assert optimizer.param_groups[0]["initial_step"] == 0.1


def test_rates_and_decay_are_those_of_each_parameters_group():
    model, twin, batch = twins()

    def groups(network, factor):
        matrices = [p for p in network.parameters() if p.ndim == 2]
        vectors = [p for p in network.parameters() if p.ndim == 1]
        return [
            {"params": matrices, "lr": 0.1 * factor, "weight_decay": 0.2},
            {"params": vectors, "lr": 0.5 * factor},
        ]

    ours = Kronecker(model, lr=7.0, params=groups(model, 1.0))
    train(model, ours, batch)
    train(twin, torch.optim.SGD(groups(twin, 0.9), lr=7.0), batch)
    assert_same_weights(model, twin)
    assert [group["initial_step"] for group in ours.param_groups] == [0.1, 0.5]


def test_momentum_averages_the_preconditioned_gradient():
    theta = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = Diagonal(theta, lr=0.1, scale=1.0, momentum=0.5)
    optimizer.factors()[0].fill_(2.0)
    moves = []
    for gradient, factor in ((1.0, 3.0), (1.0, 3.0)):
        theta.grad = torch.full_like(theta, gradient)
        before = theta.item()
        optimizer.step()
        moves.append(theta.item() - before)
        optimizer.factors()[0].fill_(factor)
    assert moves == pytest.approx([-0.4, -(0.5 * 0.4 + 0.9)])


@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_clip_bounds_the_norm_of_the_whole_update_and_keeps_its_direction(clip):
    start, batch = build("mlp")

    def update(**options):
        model = copy.deepcopy(start)
        train(model, Kronecker(model, lr=0.5, **options), batch, steps=1)
        moves = [a - b for a, b in zip(model.parameters(), start.parameters(), strict=True)]
        return torch.cat([move.detach().reshape(-1) for move in moves])

    free = update()
    expected = free * min(1.0, clip / free.norm().item())
    torch.testing.assert_close(update(clip=clip), expected, rtol=1e-9, atol=1e-15)


def test_clip_accepts_gradients_of_zero_and_none_at_all():
    theta = nn.Parameter(torch.ones(3))
    optimizer = Diagonal(theta, clip=0.1)
    optimizer.step()
    theta.grad = torch.zeros(3)
    optimizer.step()
    assert torch.equal(theta.detach(), torch.ones(3))


def test_clip_mixes_types():
    model = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 2).bfloat16())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in model.parameters()]
    Kronecker(model, lr=1.0, clip=0.5).step()
    moves = [p.detach().double() - b.double() for p, b in zip(model.parameters(), before, strict=True)]
    norm = torch.cat([move.reshape(-1) for move in moves]).norm()
    assert norm.item() == pytest.approx(0.5, rel=1e-2)


def test_parameters_without_gradient_stay():
    model, batch = build("mlp")
    optimizer = Kronecker(model, lr=0.1, momentum=0.9, weight_decay=0.1)
    for layer in optimizer.layers:
        randomised(layer.block)
    backward(model, batch)
    model[0].bias.grad = None
    model[3].weight.grad = None
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert still == ["0.bias", "3.weight"]


def test_a_subset_alone_moves():
    model, batch = build("mlp")
    optimizer = Kronecker(model, params=[model[0].weight])
    backward(model, batch)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    assert [name for name, p in model.named_parameters() if not torch.equal(p, before[name])] == ["0.weight"]


def test_an_embedding_moves_only_words_that_occurred():
    model = nn.Embedding(5, 3)
    optimizer = Kronecker(model)
    randomised(optimizer.layers[0].block)
    before = model.weight.detach().clone()
    model(torch.tensor([1, 3])).square().sum().backward()
    optimizer.step()
    assert (model.weight != before).any(1).tolist() == [False, True, False, True, False]


def test_sparse_gradients_move_weights_as_dense_ones():
    weights = []
    for sparse in (True, False):
        torch.manual_seed(1)
        model = nn.Embedding(5, 3, sparse=sparse)
        optimizer = Kronecker(model, weight_decay=0.1)
        model(torch.tensor([1, 3])).square().sum().backward()
        optimizer.step()
        weights.append(model.weight.detach())
    torch.testing.assert_close(*weights)


def test_low_precision_weights_move_by_a_float32_update():
    model = nn.Linear(3, 2).bfloat16()
    optimizer = Kronecker(model, lr=0.1, momentum=0.9)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    before, update = model.weight.detach().float(), 0.9 * optimizer.displacement()[0]
    optimizer.step()
    assert update.dtype == torch.float32 and model.weight.dtype == torch.bfloat16
    assert optimizer.state[model.weight]["momentum_buffer"].dtype == torch.float32
    assert torch.equal(model.weight.detach(), (before + update).bfloat16())


def test_closure_is_evaluated_with_gradients_and_returned():
    model, twin, batch = twins()
    ours, theirs = Kronecker(model, lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.09)

    def closure():
        backward(model, batch)
        return torch.tensor(3.0)

    assert ours.step(closure) == 3.0
    train(twin, theirs, batch, steps=1)
    assert_same_weights(model, twin)


def test_rosenbrock_needs_no_module():
    point = nn.Parameter(torch.tensor([-1.0, 1.5], dtype=torch.float64))
    for model in (point, [point], iter([point])):
        optimizer = Full(model, lr=1e-3)
        x, y = point
        loss = (1 - x) ** 2 + 100 * (y - x**2) ** 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        x, y = point.detach()
        assert (1 - x) ** 2 + 100 * (y - x**2) ** 2 < loss


def test_grad_scaler_drives_it():
    model, twin, batch = twins()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = Kronecker(model, lr=0.1)
    scaler.scale(model(batch).square().mean()).backward()
    scaler.step(optimizer)
    twin(batch).square().mean().backward()
    torch.optim.SGD(twin.parameters(), lr=0.09).step()
    assert_same_weights(model, twin)


def test_rescale_changes_p_and_leaves_lr_and_its_schedule_alone():
    theta = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = Diagonal(theta, lr=0.1, scale=1.0)
    optimizer.rescale(3.0)
    optimizer.param_groups[0]["lr"] = 0.05
    theta.grad = torch.ones_like(theta)
    assert optimizer.displacement()[0].item() == pytest.approx(-0.3)
    optimizer.step()
    assert theta.item() == pytest.approx(-0.15)
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.gpu
def test_a_step_never_waits_for_the_device():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.LayerNorm(3)).cuda()
    optimizer = Kronecker(model, momentum=0.9, clip=0.1, weight_decay=0.1)
    model(torch.randn(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.displacement()
        optimizer.pull_back([torch.ones_like(p) for p in optimizer.moved()])
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("matmul", ["float32", "tf32", "bfloat16"])
def test_a_step_can_be_captured_in_a_cuda_graph(matmul):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)).cuda()
    twin = copy.deepcopy(model)
    optimizers = []
    for network in (model, twin):
        optimizers.append(Kronecker(network, momentum=0.9, clip=0.1, weight_decay=0.1, matmul=matmul))
        network(torch.ones(2, 4, device="cuda")).square().sum().backward()
        optimizers[-1].step()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        optimizers[0].take_step()
    captured.replay()
    captured.replay()
    optimizers[1].step()
    optimizers[1].step()
    assert_same_weights(model, twin, 1e-6)
