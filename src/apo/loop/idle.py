"""Notice that a network trains while the optimizer that apo is attached to takes no step: then nothing is learned.

Such loops build the optimizer anew after ``apo.attach``, step a copy of it, or another one. A tuner hears nothing of
that, because it listens to the optimizer it was given. What it does hear are the passes of the network. Many of them
without a step are no slip yet: gradients may be accumulated, a validation may run without ``no_grad``, an attack on the
inputs or a measurement of gradient noise may back-propagate as well. But none of these moves the weights.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer

from apo.errors import ApoWarning
from apo.loop.hooks import fills_gradients
from apo.loop.outputs import with_paths
from apo.torch_internals import version_of

__all__ = ["Idle"]

#: Passes after a step that are not looked at, so that an ordinary loop pays for a count alone.
_FREE = 20
#: Passes that were back-propagated since the last step, each at weights that had moved.
_MOVED = 100
#: The same at weights that stay, as those of a copied optimizer do, if there never was a step; more than anybody is
#: likely to accumulate.
_STILL = 250

_SENTENCE = (
    "{} losses were back-propagated since the attached optimizer last took a step, {}, so apo learns nothing: attach "
    "to the optimizer that the loop steps, after it was built for the last time, and neither copy nor replace it; all "
    "is well only if another one is meant to train, or that many losses are accumulated, for now"
)


class _Steps:
    """How many steps all attached optimizers of one network have taken: they may take turns."""

    number = 0


_STEPS: weakref.WeakKeyDictionary[nn.Module, _Steps] = weakref.WeakKeyDictionary()


class Idle:
    """Watches for training without the attached optimizer, and says so once.

    Args:
        model: The network.
        optimizer: The attached optimizer.

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
        self._seen, self._before = self._steps.number, self._steps.number
        self._passes = self._moved = self._back_propagated = 0
        self._versions: int | None = None
        self._has_spoken = False

    def note_step(self) -> None:
        """Take notice of a step of the attached optimizer."""
        self._steps.number += 1

    def note_pass(self, output: Any) -> None:
        """Take notice of a pass of the network that may be back-propagated, and of what it returned."""
        if self._seen != self._steps.number:
            self._seen, self._versions = self._steps.number, None
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
            warnings.warn(_SENTENCE.format(self._passes, how), ApoWarning, stacklevel=2)
