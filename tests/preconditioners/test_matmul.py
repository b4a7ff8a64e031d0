"""Products in lower precision: close to the exact ones, with factors that stay as they are."""

from __future__ import annotations

import pytest
import torch
from tests.preconditioners.conformance import randomised
from torch import nn

from apo.preconditioners import Block, FactoredConvBlock, Kronecker, KroneckerBlock

BLOCKS = {
    "matrix": lambda **options: KroneckerBlock(48, 100, **options),
    "factored": lambda **options: FactoredConvBlock(32, 24, 9, **options),
}


def pair(kind: str, matmul: str) -> tuple[Block, Block]:
    """Returns a block of the given precision and its twin in float64."""
    exact = randomised(BLOCKS[kind](dtype=torch.float64))
    block = BLOCKS[kind](dtype=torch.float32, matmul=matmul)
    for name, factor in block.factors.items():
        factor.copy_(exact.factors[name])
    return block, exact


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    assert found.dtype == torch.float32
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind", BLOCKS)
def test_bfloat16_products_are_within_two_percent(kind):
    block, exact = pair(kind, "bfloat16")
    gradient, cotangent = torch.randn(block.shape), torch.randn(block.shape)
    error = relative_error(block.apply(gradient), exact.apply(gradient))
    assert 1e-4 < error < 2e-2  # and not exact: the option does something
    expected = exact.pull_back(gradient, cotangent)
    for name, found in block.pull_back(gradient, cotangent).items():
        assert 1e-4 < relative_error(found, expected[name]) < 2e-2
    assert all(factor.dtype == torch.float32 for factor in block.factors.values())


def test_bfloat16_leaves_a_block_without_products_exact():
    exact, block = KroneckerBlock(4, 5, False, False), KroneckerBlock(4, 5, False, False, matmul="bfloat16")
    block.factors["S"].copy_(randomised(exact).factors["S"])
    gradient = torch.randn(4, 5)
    assert torch.equal(block.apply(gradient), exact.apply(gradient))


def precision() -> tuple[bool, str]:
    return torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()


@pytest.mark.parametrize("users", ["highest", "high"])
def test_tf32_holds_for_the_products_alone(users, monkeypatch):
    block, _ = pair("matrix", "tf32")
    inside = []
    inner = type(block)._apply

    def spy(self, gradient):
        backend = torch.backends.cuda.matmul
        inside.append(getattr(backend, "fp32_precision", None) or backend.allow_tf32)
        return inner(self, gradient)

    monkeypatch.setattr(type(block), "_apply", spy)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(users)
        outside = precision()
        block.apply(torch.randn(block.shape))
        assert inside in (["tf32"], [True])
        assert precision() == outside
        with pytest.raises(ValueError, match="gradient must have the block's shape"):
            block.apply(torch.randn(3))
        assert precision() == outside
    finally:
        torch.set_float32_matmul_precision(before)


def test_an_optimizer_hands_its_precision_to_bundles_too():
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    errors = []
    for matmul in ("float32", "bfloat16"):
        torch.manual_seed(3)
        optimizer = Kronecker(model, matmul=matmul)
        exact = [randomised(layer.block).to_dense().double() for layer in optimizer.layers]
        layer, found = optimizer.layers[0], optimizer.displacement()[0]
        gradient = layer.view.gather([p.grad for p in layer.params]).double()
        expected = layer.view.scatter(-0.1 * (exact[0] @ gradient.reshape(-1)).reshape(gradient.shape))[0]
        errors.append(relative_error(found, expected))
    assert errors[0] < 1e-5 < 1e-3 < errors[1] < 2e-2
