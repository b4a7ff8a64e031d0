"""A preconditioner in the eigenbasis of gradient statistics, of which two numbers are learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from apo.preconditioners.block import Block, dense, factor_type
from apo.preconditioners.factored_conv_block import along, contracted

__all__ = ["EigenbasisBlock"]

#: Added to the averages relative to their mean eigenvalue: where gradients have been zero the basis stays as it is.
_RIDGE = 1e-7
#: How long a gradient may be, relative to the root of the mean square of its predecessors.
_LONGEST = 2.0
#: The largest logarithm of rate and damping, relative to where they start, and the smallest but for its sign.
_FARTHEST = 18.0


@final
class EigenbasisBlock(Block):
    r"""A step size for each direction of an eigenbasis, from its second moments, a rate and a damping.

    For a gradient :math:`g_W` ``[rows, cols]``, let U and R be eigenvectors of running averages of
    :math:`g_W g_W^\top` and :math:`g_W^\top g_W`, and V the running average of :math:`M \odot M` with
    :math:`M = U^\top g_W R`: the second moments of the gradient in that basis. Then

    .. math::
        P\, g_W = r\, U (M \oslash D) R^\top, \qquad D = V / \operatorname{mean} V + \delta,

    with two learned numbers, :math:`\log r` (the rate) and :math:`\log \delta` (the damping). P is symmetric and
    positive definite, and at most :math:`r / \delta` in any direction. With cotangent h and
    :math:`\tilde h = U^\top h R` the pull-back is

    .. math::
        \partial \log r = r\, \langle \tilde h, M \oslash D \rangle, \qquad
        \partial \log \delta = -r\, \delta\, \langle \tilde h, M \oslash D \oslash D \rangle.

    **Statistics.** U, R, V and the two averages are no meta-parameters. :meth:`observe` takes in the gradient of a
    training step, once the step has been computed; so P does not depend on the gradient that it multiplies, except
    for spikes, and the mean of its steps is P times the mean gradient. All of them are relative (a basis, and V to its
    mean), so averages that start at zero need no correction, and P does not change if the loss is multiplied by a
    number.

    **Sampled targets.** Squared gradients are a poor curvature where the loss is nearly zero, as in a regression that
    fits its targets. With ``sampled=True`` U, R and V come from gradients of the loss on the same inputs at targets
    drawn from the network's own outputs. Their covariance is the Fisher matrix divided by the size of the batch,
    whatever the targets are, and P needs it only up to a factor.

    **Spikes.** When a plateau ends, gradients may grow tenfold within a few steps, and a rate that was learned before
    would throw the weights far away. So a gradient counts for at most twice its usual length, which is the root of the
    mean of the squared lengths before (the statistics ``length`` and ``weight``, which grows
    from zero to one as the averages do). Gradients may still grow for good, by at most 1.5% a step.

    **Change of basis.** :meth:`refresh` finds new eigenvectors. With :math:`O = U_{new}^\top U` the gradient's
    coordinates become :math:`O M`. If different coordinates are uncorrelated, as they are in an eigenbasis on average,
    the second moments become

    .. math:: V_{new} = (O \odot O)\, V

    and likewise for the columns. The rows and columns of :math:`O \odot O` sum to one, so the mean of V stays.

    A gradient may have three dimensions, as a factored convolution's does; each dimension then has its own basis. One
    without a basis keeps the identity, so that a block without any is a diagonal one.

    Args:
        shape: Shape of the gradient.
        sides: The dimensions that have a basis, counted from the last one, which is -1.
        stack: If given, the gradient is ``[stack, *shape]``, and each part has its own basis and numbers.
        memory: The coefficient of the running averages: 0.99 remembers about a hundred steps.
        sampled: Whether U, R and V come from gradients at sampled targets.
        matmul: Precision of products with the bases: ``"float32"``, ``"tf32"`` or ``"bfloat16"``.
        dtype: Type of the gradient; factors and statistics are at least float32.
        device: Where they live.

    Example:
        >>> block = EigenbasisBlock((3, 5), (-2, -1))
        >>> sorted(block.factors), sorted(block.statistics)
        (['log_damping', 'log_rate'], ['V', 'average-1', 'average-2', 'basis-1', 'basis-2', 'length', 'weight'])
        >>> gradient = torch.randn(3, 5)
        >>> bool((block.apply(gradient) == gradient).all())  # the identity, as long as it has observed nothing
        True
    """

    stackable: ClassVar[bool] = True

    def __init__(
        self,
        shape: Sequence[int],
        sides: Sequence[int] = (),
        *,
        stack: int | None = None,
        memory: float = 0.99,
        sampled: bool = False,
        matmul: str = "float32",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        lead = () if stack is None else (stack,)
        place: dict[str, Any] = {"dtype": factor_type(dtype), "device": device}
        self._dims = len(shape)
        self._sides = tuple(sides)
        self._memory = memory
        self._sampled = sampled
        statistics = {name: torch.zeros(lead, **place) for name in ("weight", "length")}
        statistics["V"] = torch.zeros((*lead, *shape), **place)
        for side in self._sides:
            size = shape[side]
            statistics[f"average{side}"] = torch.zeros(*lead, size, size, **place)
            statistics[f"basis{side}"] = torch.eye(size, **place).repeat(*lead, 1, 1)
        factors = {name: torch.zeros(lead, **place) for name in ("log_rate", "log_damping")}
        super().__init__((*lead, *shape), factors, matmul=matmul, statistics=statistics)

    @torch.no_grad()
    def observe(self, gradient: Tensor, sampled: bool = False) -> None:
        """Take a gradient into the averages and into V, if it is of their kind."""
        share = 1.0 - self._memory
        with self._arithmetic():
            gradient = self._read("gradient", gradient)
            if not sampled:
                gradient = self._shortened(gradient)
                weight = self.statistics["weight"]
                weight.lerp_(torch.ones_like(weight), share)
                self.statistics["length"].lerp_(self._flat(gradient).square().mean(-1), share)
            if sampled == self._sampled:
                self.statistics["V"].lerp_(self._rotated(gradient, into=True).square(), share)
                for side in self._sides:
                    self.statistics[f"average{side}"].lerp_(contracted(gradient, gradient, side, self._dims), share)

    @torch.no_grad()
    def refresh(self, exact: bool = False) -> None:
        """Find eigenvectors of the averages again, and let V follow.

        Args:
            exact: Compute them; otherwise improve the present ones by one step of orthogonal iteration, which is enough
                as long as the averages change slowly, and takes a matrix product and a QR decomposition.
        """
        spectrum = self.statistics["V"]
        for side in self._sides:
            average, basis = self.statistics[f"average{side}"], self.statistics[f"basis{side}"]
            size = average.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(average.dtype).tiny)
            # Gradients that are not finite have already ruined the weights, and that is the error to raise.
            matrix = torch.nan_to_num(average / size[..., None, None])
            matrix.diagonal(dim1=-2, dim2=-1).add_(_RIDGE)
            found = _eigenvectors(matrix) if exact else _iterated(matrix, basis)
            spectrum.copy_(along(spectrum, (found.mT @ basis).square(), side, self._dims))
            basis.copy_(found)

    @torch.no_grad()
    def constrain(self) -> None:
        """Keep rate and damping between e^-18 and e^18, so that no sum or quotient overflows."""
        for factor in self.factors.values():
            factor.clamp_(-_FARTHEST, _FARTHEST)

    def to_dense(self) -> Tensor:
        """Return P for gradients flattened row by row, from the Kronecker product of the bases."""
        bases = {side: self.statistics[f"basis{side}"] for side in self._sides}
        return dense(self._eigenvalues(), bases, self._dims)

    def _apply(self, gradient: Tensor) -> Tensor:
        gradient = self._shortened(gradient)
        return self._rotated(self._rotated(gradient, into=True) * self._eigenvalues(), into=False)

    def _pull_back(self, gradient: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        rate, damping, damped = self.factors["log_rate"].exp(), self.factors["log_damping"].exp(), self._damped()
        gradient = self._shortened(gradient)
        product = self._rotated(gradient, into=True) * self._rotated(cotangent, into=True) / damped
        return {
            "log_rate": rate * self._flat(product).sum(-1),
            "log_damping": -rate * damping * self._flat(product / damped).sum(-1),
        }

    def _trace(self) -> Tensor:
        return self._eigenvalues().reshape(*self.shape[: self.lead], -1).sum(-1)

    def _shortened(self, gradient: Tensor) -> Tensor:
        """Return a gradient at most ``_LONGEST`` times as long as usual."""
        weight, least = self.statistics["weight"], torch.finfo(gradient.dtype).tiny
        usual = self.statistics["length"] / weight.clamp_min(least)
        now = self._flat(gradient).square().mean(-1).clamp_min(least)
        factor = (_LONGEST**2 * usual / now).clamp(max=1.0).sqrt()
        return gradient * self._spread(torch.where(weight > 0, factor, 1.0))

    def _eigenvalues(self) -> Tensor:
        """Return those of P, in the coordinates of the bases."""
        return self._spread(self.factors["log_rate"].exp()) / self._damped()

    def _damped(self) -> Tensor:
        """Return D: V relative to its mean, and the damping."""
        spectrum = self.statistics["V"]
        mean = self._flat(spectrum).mean(-1).clamp_min(torch.finfo(spectrum.dtype).tiny)
        return spectrum / self._spread(mean) + self._spread(self.factors["log_damping"].exp())

    def _rotated(self, tensor: Tensor, into: bool) -> Tensor:
        """Return a tensor in the coordinates of the bases, or back from them."""
        narrow = torch.bfloat16 if self.matmul == "bfloat16" and self._sides else tensor.dtype
        rotated = tensor.to(narrow)
        for side in self._sides:
            basis = self.statistics[f"basis{side}"].to(narrow)
            rotated = along(rotated, basis.mT if into else basis, side, self._dims)
        return rotated.to(tensor.dtype)

    def _flat(self, tensor: Tensor) -> Tensor:
        """Join the dimensions of the gradient of one block to the last one."""
        return tensor.reshape(*tensor.shape[: tensor.ndim - self._dims], -1)

    def _spread(self, numbers: Tensor) -> Tensor:
        """Let a number for each block act on the gradient of that block."""
        return numbers[(..., *[None] * self._dims)]


def _eigenvectors(matrix: Tensor) -> Tensor:
    try:
        return torch.linalg.eigh(matrix)[1]
    except RuntimeError:  # in 32 bits some routines do not converge for a few matrices
        return torch.linalg.eigh(matrix.double().cpu())[1].to(matrix)


def _iterated(matrix: Tensor, basis: Tensor) -> Tensor:
    """Return the basis after one step of orthogonal iteration, from the largest eigenvalue to the smallest."""
    product = matrix @ basis
    order = (basis * product).sum(-2).argsort(-1, descending=True)
    return torch.linalg.qr(product.gather(-1, order.unsqueeze(-2).expand_as(product)))[0]
