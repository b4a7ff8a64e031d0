"""KFAC and EKFAC as optimizers: what a step does, what it leaves alone, and exact resumption."""

from __future__ import annotations

import io

import pytest
import torch
from tests.experiments.baselines.problems import convolutional, empirical_score, linear
from torch import nn
from torch.nn import functional

from apo_experiments.baselines import EKFAC, KFAC

BOTH = pytest.mark.parametrize("optimizer_class", [KFAC, EKFAC])


def train_step(network, optimizer, inputs, target):
    optimizer.zero_grad()
    output = network(inputs)
    if optimizer.wants_statistics:
        optimizer.observe(output, "categorical")
    loss = functional.cross_entropy(output, target)
    loss.backward()
    optimizer.step()
    return loss.item()


@BOTH
@pytest.mark.parametrize("problem", [linear, convolutional])
def test_loss_falls_faster_than_with_plain_gradient_descent(optimizer_class, problem):
    network, inputs, target = problem()
    optimizer = optimizer_class(network, lr=0.1, momentum=0.0, damping=1e-2)
    losses = [train_step(network, optimizer, inputs, target) for _ in range(40)]
    network, inputs, target = problem()
    plain = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(40):
        plain.zero_grad()
        loss = functional.cross_entropy(network(inputs), target)
        loss.backward()
        plain.step()
    assert losses[-1] < loss.item()


def test_natural_gradient_step_with_momentum_and_weight_decay_is_the_formula():
    network, inputs, target = linear()
    optimizer = KFAC(network, lr=0.05, momentum=0.9, weight_decay=0.1, damping=0.01, inverse_interval=1)
    weight = network[0].weight
    buffer = 0.0
    for _ in range(3):
        train_and_check = weight.detach().clone()
        output = network(inputs)
        optimizer.observe_gradient(output, empirical_score(output, target), 12)
        optimizer.zero_grad()
        functional.cross_entropy(output, target).backward()
        gradients = [p.grad + 0.1 * p.detach() for p in network[0].parameters()]
        optimizer.step()
        direction = optimizer._precondition(optimizer._blocks[0], optimizer.layers[0].join(gradients))[:, :-1]
        buffer = 0.9 * buffer + direction
        torch.testing.assert_close(weight.detach(), train_and_check - 0.05 * buffer, rtol=1e-12, atol=1e-14)


@BOTH
def test_observing_touches_neither_gradients_nor_the_loss_graph(optimizer_class):
    network, inputs, target = linear()
    optimizer = optimizer_class(network)
    output = network(inputs)
    optimizer.observe(output, "categorical")
    assert all(p.grad is None for p in network.parameters())
    functional.cross_entropy(output, target).backward()
    observed = [p.grad.clone() for p in network.parameters()]
    network, inputs, target = linear()
    functional.cross_entropy(network(inputs), target).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(observed, network.parameters(), strict=True))


def test_parameters_without_factors_take_the_plain_gradient():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    optimizer = KFAC(network, lr=0.1, momentum=0.0)
    before = network[1].weight.detach().clone()
    train_step(network, optimizer, torch.randn(8, 4), torch.randint(3, (8,)))
    torch.testing.assert_close(network[1].weight.detach(), before - 0.1 * network[1].weight.grad)


def test_kl_clip_bounds_the_squared_length_in_the_fisher_metric():
    network, inputs, target = linear()
    optimizer = KFAC(network, lr=0.5, momentum=0.0, kl_clip=1e-4)
    before = [p.detach().clone() for p in network.parameters()]
    train_step(network, optimizer, inputs, target)
    steps = [b - p.detach() for b, p in zip(before, network.parameters(), strict=True)]
    gradients = [p.grad for p in network.parameters()]
    # step = lr nu C^-1 g, so <step, g> = lr nu <C^-1 g, g> and nu^2 lr^2 <C^-1 g, g> = kl_clip
    product = sum(torch.sum(s * g) for s, g in zip(steps, gradients, strict=True))
    unclipped, _, _ = linear()
    free = KFAC(unclipped, lr=0.5, momentum=0.0)
    start = [p.detach().clone() for p in unclipped.parameters()]
    train_step(unclipped, free, inputs, target)
    full = [b - p.detach() for b, p in zip(start, unclipped.parameters(), strict=True)]
    length = sum(torch.sum(s * g) for s, g in zip(full, gradients, strict=True)) / 0.5
    assert 0.5**2 * length > 1e-4
    assert product.item() == pytest.approx((1e-4 * length.item()) ** 0.5, rel=1e-9)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_resume_is_exact_through_a_file(optimizer_class, dtype):
    def build():
        network, inputs, target = convolutional()
        network.to(dtype)
        return (
            network,
            optimizer_class(network, lr=0.01, statistics_interval=2, inverse_interval=3),
            inputs.to(dtype),
            target,
        )

    network, optimizer, inputs, target = build()
    for _ in range(5):
        train_step(network, optimizer, inputs, target)
    file = io.BytesIO()
    torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for _ in range(6):
        train_step(network, optimizer, inputs, target)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin, resumed, inputs, target = build()
    twin.load_state_dict(saved["network"])
    resumed.load_state_dict(saved["optimizer"])
    for _ in range(6):
        train_step(twin, resumed, inputs, target)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), twin.parameters(), strict=True))


@BOTH
def test_factors_are_float32_for_a_16_bit_network_and_under_autocast(optimizer_class):
    network, inputs, target = linear()
    network.to(torch.bfloat16)
    optimizer = optimizer_class(network)
    train_step(network, optimizer, inputs.to(torch.bfloat16), target)
    assert {t.dtype for block in optimizer._blocks for t in block.values()} == {torch.float32}
    assert network[0].weight.dtype == torch.bfloat16
    network, inputs, target = linear()
    network.float()
    optimizer = optimizer_class(network)
    with torch.autocast("cpu", torch.bfloat16):
        train_step(network, optimizer, inputs.float(), target)
    assert {t.dtype for block in optimizer._blocks for t in block.values()} == {torch.float32}


def test_evaluation_without_gradients_is_not_noted():
    network, inputs, target = linear()
    optimizer = KFAC(network)
    with torch.no_grad():
        output = network(inputs)
    with pytest.raises(RuntimeError, match="no forward pass"):
        optimizer.observe(output)
    assert train_step(network, optimizer, inputs, target) > 0


def test_shared_weights_and_grouped_convolutions_have_no_factors():
    network = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Conv2d(4, 4, 3, groups=2)})
    network["b"].weight = network["a"].weight
    optimizer = KFAC(network)
    assert optimizer.layers == []


@pytest.mark.parametrize(
    "options",
    [{"lr": 0.0}, {"damping": -1.0}, {"momentum": 1.0}, {"ema": 1.0}, {"inverse_interval": 0}, {"kl_clip": 0.0}],
)
def test_bad_option_is_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        KFAC(nn.Linear(2, 2), **options)


def test_state_of_another_network_is_refused():
    state = KFAC(nn.Linear(2, 2)).state_dict()
    with pytest.raises(ValueError, match="does not belong"):
        KFAC(nn.Sequential(nn.Linear(2, 2))).load_state_dict(state)


@BOTH
def test_a_layer_that_is_used_for_the_first_time_later_on_takes_part(optimizer_class):
    torch.manual_seed(0)
    network = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)])
    optimizer = optimizer_class(network, lr=0.01, statistics_interval=1, inverse_interval=10)
    inputs, target = torch.randn(8, 4), torch.randint(3, (8,))
    for step in range(4):
        before = network[0].weight.detach().clone()
        optimizer.zero_grad()
        output = network[1](network[0](inputs) if step else inputs)
        optimizer.observe(output)
        functional.cross_entropy(output, target).backward()
        optimizer.step()
        assert torch.equal(before, network[0].weight) == (step == 0)
