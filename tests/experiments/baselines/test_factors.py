"""The factors of KFAC and EKFAC against dense oracles from one backward pass an example, in float64."""

from __future__ import annotations

import pytest
import torch
from tests.experiments.baselines.problems import convolutional, empirical_score, example_gradients, linear
from torch import nn

from apo_experiments.baselines import EKFAC, KFAC
from apo_experiments.methods import METHODS


def observed(optimizer_class, network, inputs, target, times: int = 1, **options):
    optimizer = optimizer_class(network, **options)
    for _ in range(times):
        output = network(inputs)
        optimizer.observe_gradient(output, empirical_score(output, target), len(inputs))
        optimizer.zero_grad()
        optimizer.step()  # without gradients: inverts, but moves nothing
    return optimizer


def block_of(optimizer, name: str) -> dict[str, torch.Tensor]:
    return dict(zip([layer.name for layer in optimizer.layers], optimizer._blocks, strict=True))[name]


@pytest.mark.parametrize("name", ["0", "2"])
def test_linear_factors_are_second_moments_of_activations_and_output_gradients(name):
    network, inputs, target = linear()
    block = block_of(observed(KFAC, network, inputs, target), name)
    index = int(name)
    a = network[:index](inputs)
    a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], dim=1)
    gradients = example_gradients(network, inputs, target, name)  # g a^T, and the last entry of a is 1
    g = gradients[:, :, -1]
    torch.testing.assert_close(block["omega"], a.T @ a / len(a), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(block["gamma"], g.T @ g / len(a), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["0", "2"])
def test_convolution_factors_are_sums_over_explicit_patches(name):
    network, inputs, target = convolutional()
    block = block_of(observed(KFAC, network, inputs, target), name)
    layer = network.get_submodule(name)
    features = network[: int(name)](inputs).detach()
    made = layer(features).detach().requires_grad_()
    loss = nn.functional.cross_entropy(network[int(name) + 1 :](made), target, reduction="sum")
    (g,) = torch.autograd.grad(loss, made)
    height, width = made.shape[2:]
    padded = nn.functional.pad(features, [layer.padding[0]] * 4)
    omega, gamma = 0.0, 0.0
    for n in range(len(inputs)):
        for i in range(height):
            for j in range(width):
                rows = [i * layer.stride[0] + k * layer.dilation[0] for k in range(layer.kernel_size[0])]
                columns = [j * layer.stride[1] + k * layer.dilation[1] for k in range(layer.kernel_size[1])]
                a = padded[n][:, rows][:, :, columns].flatten()
                if layer.bias is not None:
                    a = torch.cat([a, torch.ones(1, dtype=a.dtype)])
                omega = omega + torch.outer(a, a) / len(inputs)
                gamma = gamma + torch.outer(g[n, :, i, j], g[n, :, i, j]) / (len(inputs) * height * width)
    torch.testing.assert_close(block["omega"], omega, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(block["gamma"], gamma, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("problem", "name"), [(linear, "0"), (linear, "2"), (convolutional, "0"), (convolutional, "2")]
)
def test_ekfac_moments_are_those_of_the_examples_gradients_in_the_eigenbasis(problem, name):
    network, inputs, target = problem()
    optimizer = observed(EKFAC, network, inputs, target, times=2, ema=0.0, inverse_interval=100)
    block = block_of(optimizer, name)
    rotated = block["basis_out"].T @ example_gradients(network, inputs, target, name) @ block["basis_in"]
    torch.testing.assert_close(block["moments"], rotated.square().mean(0), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("problem", "name"), [(linear, "0"), (linear, "2"), (convolutional, "0"), (convolutional, "2")]
)
def test_ekfac_is_closer_to_the_exact_fisher_than_kfac(problem, name):
    network, inputs, target = problem()
    gradients = example_gradients(network, inputs, target, name).flatten(1)
    fisher = gradients.T @ gradients / len(inputs)
    kfac = block_of(observed(KFAC, network, inputs, target), name)
    ekfac = block_of(observed(EKFAC, network, inputs, target, times=2, ema=0.0, inverse_interval=100), name)
    kronecker = torch.kron(kfac["gamma"], kfac["omega"])
    basis = torch.kron(ekfac["basis_out"], ekfac["basis_in"])
    corrected = basis @ torch.diag(ekfac["moments"].flatten()) @ basis.T
    assert torch.dist(corrected, fisher) < 0.999 * torch.dist(kronecker, fisher)


def test_kfac_is_exact_for_a_single_example():
    network, inputs, target = linear()
    inputs, target = inputs[:1], target[:1]
    block = block_of(observed(KFAC, network, inputs, target), "2")
    gradient = example_gradients(network, inputs, target, "2").flatten()
    torch.testing.assert_close(torch.kron(block["gamma"], block["omega"]), torch.outer(gradient, gradient))


@pytest.mark.parametrize("optimizer_class", [KFAC, EKFAC])
def test_preconditioning_inverts_the_damped_curvature(optimizer_class):
    network, inputs, target = linear()
    damping = 0.03
    optimizer = observed(optimizer_class, network, inputs, target, damping=damping)
    block = block_of(optimizer, "0")
    gradient = torch.randn(5, 5, dtype=torch.float64)
    omega, gamma = block["omega"], block["gamma"]
    if optimizer_class is KFAC:
        pi = ((omega.trace() / 5) / (gamma.trace() / 5)).sqrt()
        identity = torch.eye(5, dtype=torch.float64)
        dense = torch.kron(gamma + damping**0.5 / pi * identity, omega + damping**0.5 * pi * identity)
    else:
        dense = torch.kron(gamma, omega) + damping * torch.eye(25, dtype=torch.float64)
    expected = torch.linalg.solve(dense, gradient.flatten()).reshape(5, 5)
    torch.testing.assert_close(optimizer._precondition(block, gradient), expected, rtol=1e-8, atol=1e-10)


def test_running_mean_is_the_plain_mean_until_ema_takes_over():
    network, inputs, target = linear()
    optimizer = KFAC(network, ema=0.75)
    omegas = []
    for k in range(6):
        output = network(inputs + k)
        optimizer.observe_gradient(output, empirical_score(output, target), len(inputs))
        a = torch.cat([inputs + k, torch.ones(12, 1, dtype=torch.float64)], dim=1)
        omegas.append(a.T @ a / 12)
        optimizer.zero_grad()
        optimizer.step()
    expected = sum(omegas[:4]) / 4
    for omega in omegas[4:]:
        expected = 0.75 * expected + 0.25 * omega
    torch.testing.assert_close(block_of(optimizer, "0")["omega"], expected, rtol=1e-12, atol=1e-14)


def test_layer_used_twice_counts_both_uses():
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    network = nn.Sequential(layer, nn.Tanh(), layer)
    inputs, target = torch.randn(5, 3, dtype=torch.float64), torch.randint(3, (5,))
    block = block_of(observed(KFAC, network, inputs, target), "0")
    rows = torch.cat([inputs, layer(inputs).tanh()])
    rows = torch.cat([rows, torch.ones(10, 1, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(block["omega"], rows.T @ rows / 5)


def test_tokens_of_a_sequence_are_cases_of_their_own():
    torch.manual_seed(0)
    network = nn.Linear(4, 3).double()
    inputs = torch.randn(2, 6, 4, dtype=torch.float64)
    optimizer = KFAC(network)
    optimizer.observe(network(inputs), "categorical")
    rows = torch.cat([inputs.flatten(0, 1), torch.ones(12, 1, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(optimizer._blocks[0]["omega"], rows.T @ rows / 12)


def test_masked_tokens_do_not_count():
    torch.manual_seed(0)
    network = nn.Linear(4, 3).double()
    inputs = torch.randn(2, 6, 4, dtype=torch.float64)
    mask = torch.arange(6).expand(2, 6) < torch.tensor([[6], [2]])
    optimizer = KFAC(network)
    output = network(inputs)
    score = torch.randn_like(output)
    optimizer.observe_gradient(output, score * mask.unsqueeze(-1), mask.sum())
    kept = score[mask]
    gamma = optimizer._blocks[0]["gamma"] * 12  # R counts all rows, M the 8 that are kept
    torch.testing.assert_close(gamma, kept.T @ kept)


def fed_with_batches(steps: int) -> tuple[EKFAC, nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """EKFAC with the method's intervals on a network that stands still, and all its data."""
    torch.manual_seed(0)
    network, _, _ = convolutional()
    inputs = torch.randn(600, 2, 8, 8, dtype=torch.float64) * 3 * torch.rand(600, 1, 1, 1, dtype=torch.float64)
    target = torch.randint(3, (600,))
    defaults = METHODS["ekfac"].defaults
    options = {name: defaults[name] for name in ("ema", "statistics_interval", "inverse_interval")}
    optimizer = EKFAC(network, **options)
    for _ in range(steps):
        if optimizer.wants_statistics:
            batch = torch.randint(600, (64,))
            output = network(inputs[batch])
            optimizer.observe_gradient(output, empirical_score(output, target[batch]), 64)
        optimizer.step()  # without gradients
    return optimizer, network, (inputs, target)


@pytest.mark.parametrize(
    "steps", [81, 86, 100]
)  # at once after a new basis, after one more observation, before the next
def test_with_the_methods_defaults_ekfac_uses_the_moments_and_not_kfacs_products(steps):
    optimizer, network, (inputs, target) = fed_with_batches(steps)
    block = block_of(optimizer, "0")
    rotated = block["basis_out"].T @ example_gradients(network, inputs, target, "0") @ block["basis_in"]
    moments = rotated.square().mean(0)
    products = torch.outer(block["values_out"], block["values_in"])
    assert torch.dist(block["moments"], moments) < 0.3 * torch.dist(products, moments)


def test_ekfac_turns_its_moments_with_the_basis():
    optimizer, _, _ = fed_with_batches(80)
    block, old = optimizer._blocks[0], dict(optimizer._blocks[0])
    optimizer._refresh(block, optimizer.layers[0])
    assert not torch.equal(block["basis_in"], old["basis_in"])
    curvature = torch.kron(old["basis_out"], old["basis_in"])
    curvature = curvature @ torch.diag(old["moments"].flatten()) @ curvature.T
    basis = torch.kron(block["basis_out"], block["basis_in"])
    torch.testing.assert_close(block["moments"].flatten(), (basis.T @ curvature @ basis).diagonal())
