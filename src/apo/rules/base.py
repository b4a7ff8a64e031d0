r"""What the meta-step asks of an update rule.

A rule owns an optimizer, its meta-parameters :math:`\phi` and the meta-optimizer that moves them. On most iterations
the optimizer steps as usual. A meta-iteration goes like this (T is the tuner in :mod:`apo.loop.tuner`, M the meta-step
in :mod:`apo.core.meta_step`)::

    T  rule.before_step(fade)        before every step, of any iteration
    T  with rule.measuring():        the optimizer's step() runs inside
    M  proposal = rule.propose()     the step has run: where does the look-ahead go, and how is h pulled back to phi?
    M  rule.first_look(proposal)     only before parameters move for the first time: find the scale of phi
    M  rule.meta_update(gradients)   here is the gradient of Q with respect to phi (not called if it is not finite)
    M  rule.after(outcome)           the look-ahead is over; was it good, and is there anything to tell the user?
    M  proposal.take_step()          the weights are back at theta: move them with the new phi

A custom rule is a subclass with :meth:`Rule.phi`, :meth:`Rule.propose` and a :class:`Proposal`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = [
    "Comparison", "MetaOptimizerFactory", "Outcome", "Proposal", "Rule", "Slope", "Standing", "moving_parameters",
]  # fmt: skip

#: Builds the meta-optimizer from the meta-parameters.
MetaOptimizerFactory = Callable[[list[Tensor]], Optimizer]

#: Maps a displacement to <h, displacement>: how fast Q rises along it at its end. The same number on every process.
Slope = Callable[[Sequence[Tensor]], float]


class Comparison(NamedTuple):
    r"""What the two batches say about one look-ahead: promise and price on B and on B', and the price of FSD and WSD.

    In a quadratic model the loss changes by :math:`-a + c/2` over the look-ahead: the gradient promises
    :math:`a = -\langle g, \Delta\rangle`, and the curvature has its price :math:`c = \Delta^\top H \Delta`.
    """

    own_promise: float
    own_price: float
    other_promise: float
    other_price: float
    proximal_price: float


class Standing(Enum):
    """What a rule thinks of the network after a meta-step."""

    AS_BEFORE = "as before"
    BETTER = "better"  # than ever: weights that are worth going back to
    HELD_BACK = "held back"  # the rate had to be lowered
    LOST = "lost"  # only going back to earlier weights helps


class Outcome(NamedTuple):
    """How a look-ahead went.

    Attributes:
        step: Index of the training step.
        loss: Q at theta itself, where nothing has moved.
        objective: Q at the look-ahead.
        share: The share of the loss term on B'.
        comparison: What B and B' say each; None unless the rule ``compares`` and both have a share in the loss term.
        weights: Norm of the weights of a network with normalisation layers that average over images; None for others.
        resolution: Changes of the loss below this are lost in rounding.
        silent: The share of the parameters whose gradient is exactly zero.
        can_go_back: Whether earlier weights are kept.
        pace: How many times faster than usual a rate may rise, because training is short.
        setback: Returns by how much the loss on B is above that at the earlier weights, which takes a pass; None
            if none are kept.
    """

    step: int
    loss: float
    objective: float
    share: float = 0.0
    comparison: Comparison | None = None
    weights: float | None = None
    resolution: float = 0.0
    silent: float = 0.0
    can_go_back: bool = True
    pace: float = 1.0
    setback: Callable[[], float] | None = None


def moving_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that a step moves, in the order of the param groups: those that have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


class Proposal(ABC):
    r"""One look-ahead, as a function of phi.

    Args:
        parameters: What the step moves, in the order of :meth:`displacement`.
        coupled_decay: The L2 coefficient that the optimizer adds to the gradient of each of them; None for none.

    Attributes:
        parameters: The first argument.
        coupled_decay: The second.
        wants_sampled_gradients: Whether :meth:`observe_sampled` is to be called.

    Example:
        >>> import apo, torch
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> weight.grad = torch.ones(2, 2)
        >>> optimizer = apo.Kronecker(weight, lr=0.1)
        >>> proposal = apo.Preconditioned(optimizer).propose({})
        >>> [tuple(delta.shape) for delta in proposal.displacement()]
        [(2, 2)]
        >>> len(proposal.pull_back([torch.ones(2, 2)])) == len(optimizer.factors())
        True
    """

    wants_sampled_gradients: bool = False

    def __init__(self, parameters: Sequence[Tensor], coupled_decay: Sequence[float] | None = None) -> None:
        self.parameters = list(parameters)
        self.coupled_decay = [0.0] * len(self.parameters) if coupled_decay is None else list(coupled_decay)

    @abstractmethod
    def displacement(self) -> list[Tensor]:
        r"""Return :math:`\Delta(\phi)` at the phi in force, one tensor per parameter."""

    @abstractmethod
    def pull_back(self, cotangent: Sequence[Tensor]) -> list[Tensor]:
        r"""Return :math:`(\partial \Delta / \partial \phi)^\top h`, one tensor for each of the rule's phi.

        Args:
            cotangent: :math:`h = \nabla_{\theta'} Q`, aligned with :meth:`displacement`.
        """

    def step_norm(self) -> Tensor | None:
        """Return the size of the coming step, in any unit, if a finite size guarantees finite weights.

        None, the default, makes the meta-step check the weights after the step, which waits for the device.
        """
        return None

    @abstractmethod
    def take_step(self) -> None:
        """Move the parameters from theta, where they are now, with the phi that is in force now."""

    def observe_sampled(self, gradients: Sequence[Tensor]) -> None:
        """Learn of the curvature at theta. The meta-step calls it after the weights have moved, if that is wanted.

        Args:
            gradients: Of the loss at targets that were drawn from the network's outputs, one for each parameter.
        """

    def summary(self) -> dict[str, float]:
        """Return further figures for the record of the meta-step, after the step was taken."""
        return {}


class Rule(ABC):
    """An optimizer with meta-parameters that can be learned; the module's docstring says who calls what when.

    Attributes:
        optimizer: The optimizer that moves the weights.
        meta_optimizer: The optimizer that moves phi.
        fsd_weight: Default weight of the function-space term.
        wsd_weight: Default weight of the weight-space term.
        other_batch_share: Default share of the loss term that is taken on B'.
        split: Whether each of many processes keeps a part of phi; otherwise all have the same phi.
        interval: An interval between meta-steps that overrides the user's for now, or None. The tuner reads it.
        compares: Whether :meth:`after` needs to know what each batch says.
        auto_intervals: The intervals that the rule would choose: pairs of a step and the interval before it. The tuner
            reads them if the user leaves the choice to the rule.
        standing: What the rule thinks of the network since the last :meth:`after`. The meta-step reads it.

    Example:
        >>> import apo, torch
        >>> issubclass(apo.LearningRate, apo.Rule)
        True
    """

    fsd_weight: float = 0.3
    wsd_weight: float = 0.0
    other_batch_share: float = 0.0
    split: bool = False
    interval: int | None = None
    compares: bool = False
    auto_intervals: tuple[tuple[float, int], ...] = ((math.inf, 10),)  # the paper's
    standing: Standing = Standing.AS_BEFORE
    optimizer: Optimizer
    meta_optimizer: Optimizer

    @abstractmethod
    def phi(self) -> list[Tensor]:
        """Return the meta-parameters: leaf tensors that the meta-optimizer moves. Called at any time."""

    def before_step(self, fade: float = 1.0) -> None:
        """Take in what changed since the last step, such as new param groups. The tuner calls it before every step.

        Args:
            fade: Factor of a learned rate, which falls to 0 where the end of training is known.
        """

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Prepare the optimizer for the step of a meta-iteration, and undo that on leaving.

        The tuner enters it before ``optimizer.step()`` and leaves it after, also when the step fails. A closure runs
        outside: it is left before and entered again after.
        """
        yield

    @abstractmethod
    def propose(self, theta: Mapping[Tensor, Tensor]) -> Proposal:
        """Describe the look-ahead. The meta-step calls it after the optimizer has stepped.

        Args:
            theta: The weights before the step, by parameter.
        """

    def first_look(self, proposal: Proposal, slope: Slope, often: bool = False, newcomers: bool = False) -> None:
        """Find the scale of phi. The meta-step calls it before any weight has moved, and before further ones move.

        Args:
            proposal: The first look-ahead.
            slope: Evaluates others along it.
            often: Whether the next steps are all meta-steps.
            newcomers: Whether training is under way, and parameters join it that were frozen or are new.
        """

    def meta_update(self, gradients: Sequence[Tensor], outcome: Outcome | None = None) -> None:
        """Move phi by one step of the meta-optimizer. The meta-step calls it unless a gradient is not finite.

        Args:
            gradients: Of Q with respect to phi.
            outcome: How the look-ahead went; only a rule that ``compares`` is given it.
        """
        for parameter, gradient in zip(self.phi(), gradients, strict=True):
            parameter.grad = gradient.to(parameter.device, parameter.dtype).reshape(parameter.shape)
        self.meta_optimizer.step()
        self.meta_optimizer.zero_grad()

    def after(self, outcome: Outcome) -> list[str]:
        """Learn how the look-ahead went. The meta-step calls it after phi moved, before the weights do.

        A loss that is not finite is handed in as well: a rule that sets ``standing`` to LOST can be continued.

        Returns:
            What the user should know, such as a rate that has reached a bound; each sentence is shown once.
        """
        return []

    def rates(self) -> tuple[float, ...]:
        """Return the learning rate in force, one per param group, for users and records."""
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups)

    def detach(self) -> None:
        """Leave the optimizer as an ordinary one. The tuner calls it when it detaches."""

    def state_dict(self) -> dict[str, Any]:
        """Return phi and the meta-optimizer's state, without the optimizer's own. The tuner calls it to save."""
        return {
            "phi": [parameter.detach().clone() for parameter in self.phi()],
            "meta_optimizer": self.meta_optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore phi and the meta-optimizer. The tuner calls it after the optimizer has loaded its own state.

        Args:
            state: What :meth:`state_dict` returned; None if the optimizer's state was saved without apo.

        Raises:
            ValueError: The state belongs to a rule with other meta-parameters.
        """
        if state is None:
            return
        own, saved = self.phi(), state["phi"]
        if [tuple(p.shape) for p in own] != [tuple(p.shape) for p in saved]:
            raise ValueError(
                f"the saved state has {len(saved)} meta-parameters that do not fit the {len(own)} of "
                f"{type(self).__name__}: build the rule with the same optimizer and options as the saved one"
            )
        with torch.no_grad():
            for parameter, value in zip(own, saved, strict=True):
                parameter.copy_(value)
        self.meta_optimizer.load_state_dict(state["meta_optimizer"])
