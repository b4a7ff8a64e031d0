"""Notice that what apo sees is not what training does: three watchers, each with a sentence for the user.

A look-ahead evaluates the losses that the network and the criterion made, and moves the weights of one optimizer. That
is training only if

* the gradients are those of these losses (:class:`Agreement`),
* the losses have the scale that the function-space term expects (:class:`LossScale`),
* and that optimizer is the one which steps (:class:`Idle`).
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.optim import Optimizer

from apo.core.objective import ProximalObjective
from apo.errors import ApoWarning
from apo.passes.operations import with_paths
from apo.rules.base import Outcome
from apo.torch_internals import version_of, will_reach
from apo.vectors import dot, norm

__all__ = ["Agreement", "Idle", "LossScale", "cosine", "fills_gradients"]

#: Below this cosine less than a quarter of the gradient's square is along that of the loss which apo sees.
_LEAST_COSINE = 0.5
#: When to look for the second time, and by which factor the number of steps grows until the next time.
_AGAIN, _FACTOR = 100, 10

_DISAGREES = (
    "the gradients that the optimizer used are not those of the loss that apo runs again (their cosine is below "
    f"{_LEAST_COSINE}), so the learned rate may be wrong: put all parts of the loss into the criterion, criterion = "
    "apo.criterion(your_function), and do not add noise to the gradients; if neither is possible, train without apo"
)


class Agreement:
    """Compares the gradient of the loss that apo runs again with the one that the optimizer has used.

    A second loss that the loop computes without network and criterion, noise that it adds to the gradients or a state
    outside of the modules is part of training, and the look-ahead does not see it. A little of that does no harm. If
    most of the gradient comes from elsewhere, the learned rate is the best one for another problem. So gradients are
    compared at the first meta-step, and rarely after it, because the weights of several losses may change. Some
    optimizers (LARS) write what they make of the gradients into them; then there is nothing to compare with.

    Example:
        >>> agreement = Agreement()
        >>> [step for step in range(0, 5000, 10) if agreement.is_due(step)]
        [0, 100, 1000]
        >>> agreement.sentences(0.99), len(agreement.sentences(0.1))
        ([], 1)
    """

    def __init__(self) -> None:
        self._next = 0
        self._noted: list[Tensor] = []  # parameters, and the versions of their gradients before the optimizer's step
        self._versions: list[tuple[int, int]] = []

    def note_gradients(self, step: int, parameters: Iterable[Tensor]) -> None:
        """Take notice of the gradients with which the optimizer is about to step."""
        if step >= self._next:
            self._noted = list(parameters)
            self._versions = _versions(self._noted)

    def is_due(self, step: int) -> bool:
        """Return whether to compare at this meta-step, unless it has changed the gradients itself.

        It is then not due again for long.
        """
        if step < self._next:
            return False
        self._next = max(_AGAIN, _FACTOR * step)
        noted, self._noted = self._noted, []
        return not noted or self._versions == _versions(noted)

    def sentences(self, found: float | None) -> list[str]:
        """Return what the user should know.

        Args:
            found: The cosine; None if it was not due. It is NaN if a gradient is zero, which others tell the user.
        """
        return [_DISAGREES] if found is not None and found < _LEAST_COSINE else []


def _versions(parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return which tensors the gradients are, and their version counters; that waits for no device."""
    return [(id(p.grad), version_of(p.grad)) for p in parameters if p.grad is not None]


def cosine(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Return the cosine of the angle between two vectors; NaN if one of them is zero.

    Example:
        >>> import torch
        >>> cosine([torch.tensor([1.0, 0.0])], [torch.tensor([3.0, 4.0])]).item() == torch.tensor(0.6).item()
        True
    """
    return dot(left, right) / (norm(left) * norm(right))


#: How many look-aheads do not count, and how many of the last ones are judged together.
_FIRST, _WINDOW = 30, 30
#: The price of the term, as a multiple of that of the curvature: more than this is too much, and this is usual.
_MOST, _USUAL = 10.0, 0.3
#: The part of the loss by which a look-ahead promises to lower it: less than this is little.
_SLOW = 1e-3

_IS_SCALED = (
    "the function-space term costs {:.0f} times as much as the curvature of the loss, which holds the rate down: "
    "the loss seems to be multiplied by about {:.0e}, or less, inside the criterion or the network; take the factor "
    "out, or pass discrepancy=apo.Bregman(loss) if the criterion is convex in the outputs, or fsd_weight={:.0e}"
)


class LossScale:
    """Notices a loss that is multiplied by a small number where apo cannot see it: inside criterion or network.

    The function-space term has a weight that fits a divergence on the scale of the loss. Beside 0.001 times a loss it
    is a thousand times too heavy, and the learned rate stays so small that nothing is learned. A factor before the
    criterion is seen, see :func:`apo.core.objective.unit_of_loss`; one inside is not. But each look-ahead tells two
    prices, that of the term and that of the loss's own curvature. The first is about a third of the second if the
    divergence belongs to the loss, and up to ten times it if another one was chosen. Where the loss is linear in the
    outputs, as far from its minimum, it has no curvature, so the first look-aheads do not count, nor do those that
    promise good progress. An objective whose discrepancy belongs to the loss has the right scale.

    Example:
        >>> from apo import CategoricalKL
        >>> from apo.rules.base import Comparison
        >>> scale = LossScale(ProximalObjective(0.3, 0.0, CategoricalKL()))
        >>> outcome = Outcome(0, 1e-3, 1e-3, comparison=Comparison(1e-7, 1e-10, 1e-7, 1e-10, 3e-8))
        >>> [step for step in range(100) if scale.sentences(outcome)]
        [59]
    """

    def __init__(self, objective: ProximalObjective) -> None:
        self._objective = objective
        self._seen = 0
        self._looks: deque[tuple[float, float]] = deque(maxlen=_WINDOW)  # ratio of prices, and promise
        self._has_spoken = False

    def sentences(self, outcome: Outcome) -> list[str]:
        """Take in a look-ahead, and return what the user should know."""
        comparison, loss = outcome.comparison, abs(outcome.loss)
        if self._has_spoken or self._objective.has_scale_of_loss or comparison is None or not 0.0 < loss < math.inf:
            return []
        self._seen += 1
        if self._seen > _FIRST:
            # A price below the resolution is noise.
            own = max(comparison.own_price, outcome.resolution, math.ulp(0.0))
            self._looks.append((comparison.proximal_price / own, comparison.own_promise / loss))
        if len(self._looks) < _WINDOW:
            return []
        ratio, promise = map(median, zip(*self._looks, strict=True))
        if not (ratio > _MOST and promise < _SLOW):
            return []
        self._has_spoken = True
        factor = _USUAL / ratio
        return [_IS_SCALED.format(ratio, factor, factor * self._objective.fsd_weight)]


#: Passes after a step that are not looked at, so that an ordinary loop pays for a count alone.
_FREE = 20
#: Passes that were back-propagated since the last step, each at weights that had moved.
_MOVED = 100
#: The same at weights that stay, as those of a copied optimizer do, if there never was a step; more than anybody is
#: likely to accumulate.
_STILL = 250

_IS_IDLE = (
    "{} losses were back-propagated since the attached optimizer last took a step, {}, so apo learns nothing: attach "
    "to the optimizer that the loop steps, after it was built for the last time, and neither copy nor replace it; all "
    "is well only if another one is meant to train, or that many losses are accumulated, for now"
)


class _Steps:
    """How many steps all attached optimizers of one network have taken: they may take turns."""

    taken = 0


_STEPS: weakref.WeakKeyDictionary[nn.Module, _Steps] = weakref.WeakKeyDictionary()


class Idle:
    """Watches for training without the attached optimizer, in which nothing is learned, and says so once.

    Such loops build the optimizer again after ``apo.attach``, step a copy of it, or another one. A tuner hears nothing
    of that, because it listens to the optimizer it was given. What it does hear are the passes of the network. Many of
    them without a step are no slip yet: gradients may be accumulated, a validation may run without ``no_grad``, an
    attack on the inputs or a measurement of gradient noise may back-propagate as well. But none of these moves the
    weights.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> attached, another = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        >>> idle = Idle(model, attached)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     for _ in range(200):
        ...         output = model(torch.ones(1, 2))
        ...         idle.note_pass(output)
        ...         output.sum().backward()
        ...         another.step()
        >>> len(caught)
        1
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._steps = _STEPS.setdefault(model, _Steps())
        self._seen = self._before = self._steps.taken
        self._passes = self._moved = self._back_propagated = 0
        self._versions: int | None = None
        self._has_spoken = False

    def note_step(self) -> None:
        """Take notice of a step of the attached optimizer."""
        self._steps.taken += 1

    def note_pass(self, output: Any) -> None:
        """Take notice of a pass of the network that may be back-propagated, and of what it returned."""
        if self._seen != self._steps.taken:
            self._seen, self._versions = self._steps.taken, None
            self._passes = self._moved = self._back_propagated = 0
        self._passes += 1
        if self._passes <= _FREE or self._has_spoken:
            return
        tensors = [tensor for _, tensor in with_paths(output) if tensor.requires_grad]
        if tensors:
            owner = weakref.ref(self)  # the output may outlive the tuner

            def note(gradient: Tensor) -> None:
                idle = owner()
                if idle is not None:
                    idle._note_backward()

            register_multi_grad_hook(tensors, note, mode="any")

    def _note_backward(self) -> None:
        """Count a pass whose gradients reach the parameters; say the sentence if there were too many."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        if self._has_spoken or not fills_gradients(parameters):
            return
        versions = sum(map(version_of, parameters))  # reads no device
        self._back_propagated += 1
        self._moved += self._versions is not None and versions != self._versions
        self._versions = versions
        never = self._seen == self._before
        if self._moved >= _MOVED or (never and not self._moved and self._back_propagated >= _STILL):
            self._has_spoken = True
            how = "and the weights moved without it" if self._moved else "which it has never done"
            warnings.warn(_IS_IDLE.format(self._passes, how), ApoWarning, stacklevel=2)


def fills_gradients(parameters: Iterable[Tensor]) -> bool:
    """Return whether the backward pass now running fills the ``.grad`` of a parameter; ``autograd.grad`` does not."""
    try:
        return any(will_reach(get_gradient_edge(p).node) for p in parameters if p.requires_grad)
    except RuntimeError:
        return False
