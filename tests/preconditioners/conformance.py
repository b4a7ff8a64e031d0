"""What every block must be: a positive semi-definite matrix that acts and is differentiated as its dense twin.

A block's test derives from `BlockSuite` and says how to build one. Everything is checked in float64, against
`to_dense`, autograd and finite differences; `to_dense` is written with Kronecker products and shares no code
with `apply`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from apo.preconditioners import Block, EigenbasisBlock


def randomised(block: Block) -> Block:
    """Fills the factors with numbers that no identity hides behind, and statistics with those of random gradients."""
    if isinstance(block, EigenbasisBlock):
        for exact in (True, False):
            for _ in range(3):
                # Long ones: what a test then multiplies is no spike, which the block would shorten.
                block.observe(100 * torch.randn(block.shape, dtype=torch.float64))
            block.refresh(exact)
    for factor in block.factors.values():
        factor.copy_(torch.randn(factor.shape, dtype=torch.float64) / max(1, factor.shape[-1:].numel()) ** 0.5)
    return block


class BlockSuite(ABC):
    """The suite; `make` is called with `dtype` and `device`."""

    factor_shapes: ClassVar[dict[str, tuple[int, ...]]]

    @abstractmethod
    def make(self, **placement) -> Block: ...

    @pytest.fixture
    def block(self) -> Block:
        return randomised(self.make(dtype=torch.float64))

    def random(self, block: Block) -> Tensor:
        return torch.randn(block.shape, dtype=torch.float64)

    def test_has_the_factors_of_its_definition(self, block):
        assert {name: tuple(factor.shape) for name, factor in block.factors.items()} == self.factor_shapes
        assert not any(factor.requires_grad for factor in block.factors.values())

    def test_starts_as_the_identity(self):
        block = self.make(dtype=torch.float64)
        gradient = self.random(block)
        assert torch.equal(block.apply(gradient), gradient)
        assert torch.equal(block.to_dense(), torch.eye(prod(block.shape), dtype=torch.float64))

    def test_applies_the_dense_matrix(self, block):
        gradient = self.random(block)
        expected = (block.to_dense() @ gradient.reshape(-1)).reshape(block.shape)
        torch.testing.assert_close(block.apply(gradient), expected, rtol=1e-12, atol=1e-12)

    def test_is_symmetric_positive_semi_definite_for_any_factors(self, block):
        dense = block.to_dense()
        torch.testing.assert_close(dense, dense.mT, rtol=0, atol=1e-12)
        assert torch.linalg.eigvalsh(dense).min() >= -1e-12 * dense.abs().max()

    def test_pulls_back_what_autograd_does(self, block):
        gradient, cotangent = self.random(block), self.random(block)
        found = block.pull_back(gradient, cotangent)
        for factor in block.factors.values():
            factor.requires_grad_()
        inner = (cotangent * block.apply(gradient)).sum()
        expected = torch.autograd.grad(inner, list(block.factors.values()))
        assert list(found) == list(block.factors)
        for name, reference in zip(block.factors, expected, strict=True):
            torch.testing.assert_close(found[name], reference, rtol=1e-12, atol=1e-12)

    def test_pulls_back_what_finite_differences_say(self, block):
        gradient, cotangent = self.random(block), self.random(block)
        found = block.pull_back(gradient, cotangent)
        for name, factor in block.factors.items():
            direction, origin = torch.randn_like(factor), factor.clone()
            values = []
            for sign in (1, -1):
                factor.copy_(origin + sign * 1e-5 * direction)
                values.append((cotangent * block.apply(gradient)).sum())
            factor.copy_(origin)
            slope = (values[0] - values[1]) / 2e-5
            torch.testing.assert_close((found[name] * direction).sum(), slope, rtol=1e-7, atol=1e-8)

    def test_mean_eigenvalue_is_that_of_the_dense_matrix(self, block):
        expected = torch.linalg.eigvalsh(block.to_dense()).mean()
        torch.testing.assert_close(block.summary()["mean_eigenvalue"], expected, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_computes_in_float32_at_least(self, block, dtype):
        narrow = self.make(dtype=dtype)
        for name, tensor in narrow.tensors.items():
            assert tensor.dtype == torch.float32
            tensor.copy_(block.tensors[name])
        gradient, cotangent = self.random(block).to(dtype), self.random(block).to(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = narrow.apply(gradient)
            pulled = narrow.pull_back(gradient, cotangent)
        assert result.dtype == torch.float32
        expected = block.apply(gradient.double())
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)
        for name, reference in block.pull_back(gradient.double(), cotangent.double()).items():
            torch.testing.assert_close(pulled[name].double(), reference, rtol=1e-4, atol=1e-4)

    def test_lives_where_it_is_told_to(self):
        block = self.make(dtype=torch.float32, device="meta")
        assert {tensor.device.type for tensor in block.tensors.values()} == {"meta"}

    def test_refuses_another_shape(self, block):
        with pytest.raises(ValueError, match="gradient must have the block's shape"):
            block.apply(torch.zeros(*block.shape, 2))
        with pytest.raises(ValueError, match="cotangent must have the block's shape"):
            block.pull_back(torch.zeros(block.shape), torch.zeros(*block.shape, 2))
