"""Every block passes the conformance suite."""

from __future__ import annotations

from typing import ClassVar

import torch
from tests.preconditioners.conformance import BlockSuite, randomised

from apo.preconditioners import Block, DiagonalBlock, EigenbasisBlock, FactoredConvBlock, FullBlock, KroneckerBlock


class TestFull(BlockSuite):
    factor_shapes: ClassVar = {"C": (5, 5)}

    def make(self, **placement):
        return FullBlock(5, **placement)


class TestDiagonal(BlockSuite):
    factor_shapes: ClassVar = {"s": (2, 3)}

    def make(self, **placement):
        return DiagonalBlock((2, 3), **placement)


class TestDiagonalOfScalar(BlockSuite):
    factor_shapes: ClassVar = {"s": ()}

    def make(self, **placement):
        return DiagonalBlock((), **placement)


class TestKronecker(BlockSuite):
    factor_shapes: ClassVar = {"A": (4, 4), "B": (3, 3), "S": (3, 4)}

    def make(self, **placement):
        return KroneckerBlock(3, 4, **placement)


class TestKroneckerWithoutRows(BlockSuite):
    factor_shapes: ClassVar = {"A": (4, 4), "S": (3, 4)}

    def make(self, **placement):
        return KroneckerBlock(3, 4, dense_rows=False, **placement)


class TestKroneckerWithoutColumns(BlockSuite):
    factor_shapes: ClassVar = {"B": (3, 3), "S": (3, 4)}

    def make(self, **placement):
        return KroneckerBlock(3, 4, dense_cols=False, **placement)


class TestKroneckerWithoutEither(BlockSuite):
    factor_shapes: ClassVar = {"S": (3, 4)}

    def make(self, **placement):
        return KroneckerBlock(3, 4, False, False, **placement)


class TestKroneckerStack(BlockSuite):
    factor_shapes: ClassVar = {"A": (2, 4, 4), "B": (2, 3, 3), "S": (2, 3, 4)}

    def make(self, **placement):
        return KroneckerBlock(3, 4, stack=2, **placement)


class TestKroneckerStackWithoutRows(BlockSuite):
    factor_shapes: ClassVar = {"A": (2, 4, 4), "S": (2, 3, 4)}

    def make(self, **placement):
        return KroneckerBlock(3, 4, dense_rows=False, stack=2, **placement)


class TestFactoredConv(BlockSuite):
    factor_shapes: ClassVar = {"B": (3, 3), "A_in": (2, 2), "A_kernel": (4, 4), "S": (3, 4, 2)}

    def make(self, **placement):
        return FactoredConvBlock(3, 2, 4, **placement)


class TestFactoredConvWithoutChannels(BlockSuite):
    factor_shapes: ClassVar = {"A_kernel": (4, 4), "S": (3, 4, 2)}

    def make(self, **placement):
        return FactoredConvBlock(3, 2, 4, dense_out=False, dense_in=False, **placement)


class TestFactoredConvWithoutKernel(BlockSuite):
    factor_shapes: ClassVar = {"B": (3, 3), "A_in": (2, 2), "S": (3, 4, 2)}

    def make(self, **placement):
        return FactoredConvBlock(3, 2, 4, dense_kernel=False, **placement)


class EigenbasisSuite(BlockSuite):
    factor_shapes: ClassVar = {"log_rate": (), "log_damping": ()}


class TestEigenbasis(EigenbasisSuite):
    def make(self, **placement):
        return EigenbasisBlock((3, 4), (-2, -1), **placement)


class TestEigenbasisOfOneSide(EigenbasisSuite):
    def make(self, **placement):
        return EigenbasisBlock((3, 4), (-1,), **placement)


class TestEigenbasisOfThreeDimensions(EigenbasisSuite):
    def make(self, **placement):
        return EigenbasisBlock((3, 4, 2), (-3, -2, -1), **placement)


class TestEigenbasisWithoutSides(EigenbasisSuite):
    def make(self, **placement):
        return EigenbasisBlock((5,), **placement)


class TestEigenbasisOfScalar(EigenbasisSuite):
    def make(self, **placement):
        return EigenbasisBlock((), **placement)


class TestEigenbasisStack(EigenbasisSuite):
    factor_shapes: ClassVar = {"log_rate": (2,), "log_damping": (2,)}

    def make(self, **placement):
        return EigenbasisBlock((3, 4), (-2, -1), stack=2, **placement)


def test_kronecker_is_the_papers_formula_with_columns_stacked():
    """P_S = (A kron B) diag(vec S)^2 (A kron B)^T acts on vec(G), columns on top of each other."""
    block = randomised(KroneckerBlock(3, 4, dtype=torch.float64))
    gradient = torch.randn(3, 4, dtype=torch.float64)
    basis = torch.kron(block.factors["A"], block.factors["B"])
    dense = basis @ torch.diag(block.factors["S"].mT.reshape(-1)) ** 2 @ basis.mT
    expected = (dense @ gradient.mT.reshape(-1)).reshape(4, 3).mT
    torch.testing.assert_close(block.apply(gradient), expected, rtol=1e-12, atol=1e-12)


def test_stacked_matrices_do_not_mix():
    stack = randomised(KroneckerBlock(3, 4, stack=2, dtype=torch.float64))
    gradient = torch.randn(2, 3, 4, dtype=torch.float64)
    for index in range(2):
        single = KroneckerBlock(3, 4, dtype=torch.float64)
        for name, factor in single.factors.items():
            factor.copy_(stack.factors[name][index])
        torch.testing.assert_close(stack.apply(gradient)[index], single.apply(gradient[index]))


def test_stacked_and_concatenated_blocks_act_as_each_of_them():
    matrices = [randomised(KroneckerBlock(3, 4, dtype=torch.float64)) for _ in range(2)]
    gradients = [torch.randn(3, 4, dtype=torch.float64) for _ in range(2)]
    expected = [block.apply(gradient) for block, gradient in zip(matrices, gradients, strict=True)]
    joint = Block.stacked(matrices)
    torch.testing.assert_close(joint.apply(torch.stack(gradients)), torch.stack(expected))
    means = torch.stack([block.summary()["mean_eigenvalue"] for block in matrices])
    torch.testing.assert_close(joint.summary()["mean_eigenvalue"], means)
    diagonals = [randomised(DiagonalBlock(shape, dtype=torch.float64)) for shape in ((2, 3), (4,), ())]
    gradients = [torch.randn(block.shape, dtype=torch.float64) for block in diagonals]
    expected = [block.apply(gradient).reshape(-1) for block, gradient in zip(diagonals, gradients, strict=True)]
    found = DiagonalBlock.concatenated(diagonals).apply(torch.cat([gradient.reshape(-1) for gradient in gradients]))
    torch.testing.assert_close(found, torch.cat(expected))


def test_factors_move_and_release_their_memory_but_not_their_shapes():
    block = DiagonalBlock((3,))
    held, memory = block.factors["s"], torch.ones(5)
    block.move_factors({"s": memory[1:4]})
    memory.mul_(2)
    assert block.factors["s"] is held and held.tolist() == [2, 2, 2]
    block.release_factors()
    assert block.factors["s"].is_meta and block.factors["s"].shape == (3,)


def test_factored_conv_is_kronecker_when_its_input_factor_is_a_product():
    factored = randomised(FactoredConvBlock(3, 2, 4, dtype=torch.float64))
    matrix = KroneckerBlock(3, 8, dtype=torch.float64)
    matrix.factors["A"].copy_(torch.kron(factored.factors["A_kernel"], factored.factors["A_in"]))
    matrix.factors["B"].copy_(factored.factors["B"])
    matrix.factors["S"].copy_(factored.factors["S"].reshape(3, 8))
    gradient = torch.randn(3, 4, 2, dtype=torch.float64)
    expected = matrix.apply(gradient.reshape(3, 8)).reshape(3, 4, 2)
    torch.testing.assert_close(factored.apply(gradient), expected, rtol=1e-12, atol=1e-12)
