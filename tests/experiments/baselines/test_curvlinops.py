"""KFAC's and EKFAC's curvature against curvlinops, an independent implementation, in float64."""

from __future__ import annotations

import pytest
import torch
from tests.experiments.baselines.problems import convolutional, empirical_score, linear
from torch import nn

from apo_experiments.baselines import EKFAC, KFAC

curvlinops = pytest.importorskip("curvlinops", reason="needs curvlinops-for-pytorch")


def dense_blocks(operator_class, network, inputs, target, layers) -> dict[str, torch.Tensor]:
    """The operator's diagonal block of each layer, on [weight, bias] flattened one after the other."""
    parameters = [p for layer in layers for p in layer.parameters]
    operator = operator_class(
        network,
        nn.CrossEntropyLoss(),
        parameters,
        [(inputs, target)],
        fisher_type="empirical",
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    dense = operator @ torch.eye(operator.shape[1], dtype=inputs.dtype)
    blocks, start = {}, 0
    for layer in layers:
        size = sum(p.numel() for p in layer.parameters)
        blocks[layer.name] = dense[start : start + size, start : start + size]
        start += size
    return blocks


def weight_then_bias(layer, matrix: torch.Tensor) -> torch.Tensor:
    """Reorder a curvature matrix from rows of [out, in + 1] to the weight followed by the bias."""
    positions = torch.arange(matrix.shape[0]).reshape(len(layer.module.weight), -1)
    order = torch.cat([part.flatten() for part in layer.split(positions)])
    return matrix[order][:, order]


@pytest.mark.parametrize("problem", [linear, convolutional])
def test_kfac_equals_curvlinops(problem):
    network, inputs, target = problem()
    optimizer = KFAC(network)
    output = network(inputs)
    optimizer.observe_gradient(output, empirical_score(output, target), len(inputs))
    expected = dense_blocks(curvlinops.KFACLinearOperator, network, inputs, target, optimizer.layers)
    for layer, block in zip(optimizer.layers, optimizer._blocks, strict=True):
        ours = weight_then_bias(layer, torch.kron(block["gamma"], block["omega"]))
        torch.testing.assert_close(ours, expected[layer.name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("problem", [linear, convolutional])
def test_ekfac_equals_curvlinops(problem):
    network, inputs, target = problem()
    optimizer = EKFAC(network, ema=0.0, inverse_interval=100)
    for _ in range(2):
        output = network(inputs)
        optimizer.observe_gradient(output, empirical_score(output, target), len(inputs))
        optimizer.zero_grad()
        optimizer.step()
    expected = dense_blocks(curvlinops.EKFACLinearOperator, network, inputs, target, optimizer.layers)
    for layer, block in zip(optimizer.layers, optimizer._blocks, strict=True):
        basis = torch.kron(block["basis_out"], block["basis_in"])
        ours = weight_then_bias(layer, basis @ torch.diag(block["moments"].flatten()) @ basis.T)
        # Factors of rank below their size leave the basis of their null space open, where the moments are zero.
        torch.testing.assert_close(ours, expected[layer.name], rtol=1e-7, atol=1e-10)
