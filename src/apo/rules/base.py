r"""What the engine asks of an update rule.

A rule owns an optimizer, its meta-parameters :math:`\phi` and the meta-optimizer that moves them. On most iterations
the optimizer steps as ever. On a meta-iteration the engine calls, in this order,

1. :meth:`Rule.before_step`: the optimizer's ``step()`` is about to run;
2. :meth:`Rule.propose`: it has run; say where the look-ahead goes and how to pull a cotangent back to phi;
3. :meth:`Rule.meta_update`: here is the gradient of Q with respect to phi (left out if it is not finite);
4. :meth:`Proposal.take_step`: the weights are back at theta; move them with the new phi.

A rule of one's own is a subclass that fills in :meth:`Rule.phi`, :meth:`Rule.propose` and a :class:`Proposal`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["MetaOptimizerFactory", "Probe", "Proposal", "Rule"]

#: Builds the meta-optimizer from the meta-parameters.
MetaOptimizerFactory = Callable[[list[Tensor]], Optimizer]

#: Evaluates a look-ahead: maps a displacement to h, the gradient of Q at theta + displacement.
Probe = Callable[[Sequence[Tensor]], list[Tensor]]


class Proposal(ABC):
    r"""One look-ahead, as a function of phi.

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

    @abstractmethod
    def displacement(self) -> list[Tensor]:
        r"""Return :math:`\Delta(\phi)` at the phi in force, for each moved parameter, in order."""

    @abstractmethod
    def pull_back(self, cotangent: Sequence[Tensor]) -> list[Tensor]:
        r"""Return :math:`(\partial \Delta / \partial \phi)^\top h`, one tensor for each of the rule's phi.

        Args:
            cotangent: :math:`h = \nabla_{\theta'} Q`, aligned with :meth:`displacement`.
        """

    def step_norm(self) -> Tensor | None:
        """Return the size of the step to come, in any unit, if that tells whether it leaves the weights finite.

        None, the default, has the engine look at the weights after the step, which costs a wait for the device.
        """
        return None

    @abstractmethod
    def take_step(self) -> None:
        """Move the parameters from theta, where they are now, with the phi that is in force now."""


class Rule(ABC):
    """An optimizer with meta-parameters that can be learned.

    Args:
        optimizer: The optimizer that moves the weights.

    Attributes:
        fsd_weight: Weight of the function-space term if the user names none.
        wsd_weight: Weight of the weight-space term if the user names none.
        other_batch_share: Share of the loss term that is taken on B' if the user names none.
        interval: Overrides the interval between meta-steps while it is not None.

    Example:
        >>> import apo, torch
        >>> issubclass(apo.LearningRate, apo.Rule)
        True
    """

    fsd_weight: float = 0.3
    wsd_weight: float = 0.0
    other_batch_share: float = 0.0

    #: Whether each of many processes keeps a part of phi for itself; otherwise all have the same phi.
    split: bool = False
    #: Brings a number on which a decision rests to the host; of many processes, all get the same number.
    agree: Callable[[Tensor], float] = staticmethod(float)

    optimizer: Optimizer
    meta_optimizer: Optimizer

    @abstractmethod
    def phi(self) -> list[Tensor]:
        """Return the meta-parameters: leaf tensors that the meta-optimizer moves."""

    @abstractmethod
    def propose(self, theta: Mapping[Tensor, Tensor]) -> Proposal:
        """Describe the look-ahead after the optimizer has stepped.

        Args:
            theta: The weights before the step, by parameter.
        """

    def moved(self) -> list[Tensor]:
        """Return the parameters that the rule moves on this iteration: those that have a gradient."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    @property
    def interval(self) -> int | None:
        """An interval between meta-steps that takes precedence over the user's for now, or None."""
        return None

    def before_any_step(self) -> None:
        """Called before every step of the optimizer, on meta-iterations and others."""

    def before_step(self) -> None:
        """Prepare the optimizer for the step of a meta-iteration."""

    def break_off(self) -> None:
        """Undo :meth:`before_step`: the iteration ends in an error."""

    def first_look(self, proposal: Proposal, probe: Probe) -> None:
        """Find the scale of phi on the first meta-iteration, before any weight has moved."""

    def meta_update(self, gradients: Sequence[Tensor]) -> None:
        """Move phi by one step of the meta-optimizer."""
        for parameter, gradient in zip(self.phi(), gradients, strict=True):
            parameter.grad = gradient.to(parameter.device, parameter.dtype).reshape(parameter.shape)
        self.meta_optimizer.step()
        self.meta_optimizer.zero_grad()

    def judge(self, loss: float, objective: float) -> None:
        """Learn whether the look-ahead lowered Q (``objective < loss``: at theta itself Q is the loss)."""

    def coupled_weight_decay(self) -> list[float]:
        """Return the L2 coefficient of each moved parameter that the optimizer adds to the gradient."""
        return [0.0] * len(self.moved())

    def rates(self) -> tuple[float, ...]:
        """Return the learning rate in force, one per param group."""
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups)

    def summary(self) -> dict[str, float]:
        """Return further figures for the record of a meta-step."""
        return {}

    def warnings(self) -> list[str]:
        """Return what the user should know now, such as a rate that sticks to a bound."""
        return []

    def detach(self) -> None:
        """Leave the optimizer as an ordinary one."""

    def adopt_optimizer_state(self) -> None:
        """Called when the optimizer has loaded a state that knew nothing of apo."""

    def state_dict(self) -> dict[str, Any]:
        """Return phi and the meta-optimizer's state; the optimizer's own is not included."""
        return {
            "phi": [parameter.detach().clone() for parameter in self.phi()],
            "meta_optimizer": self.meta_optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take phi and the meta-optimizer's state back; the optimizer's own state has been loaded before.

        Raises:
            ValueError: The state belongs to a rule with other meta-parameters.
        """
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
