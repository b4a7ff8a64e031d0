"""The explicit front door: ``loss = tuner.step(inputs, target)``."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apo.distributed import are_several, leaves_gradients
from apo.errors import ApoWarning, ReplayError
from apo.loop.hooks import hooks_of_others_around, takes_gradients_away, unscale_fused
from apo.loop.tuner import Tuner
from apo.passes.recording import Autocast, Recording, Slot, as_arguments, as_call, own_loss, own_prediction, tree_map
from apo.rules.base import Rule

__all__ = ["APO"]


class APO(Tuner):
    r"""Train with Amortized Proximal Optimization, in a training loop that you write yourself.

    Every ``interval`` steps it looks ahead, evaluates the proximal objective

    .. math::
        Q(\phi) = J_B(\theta') + \lambda_{FSD} \operatorname{mean}_{x \in B'} \rho(f(x, \theta'), f(x, \theta))
            + \frac{\lambda_{WSD}}{2} \|\theta' - \theta\|^2

    at the look-ahead weights and moves the rule's meta-parameters phi down its gradient (Algorithm 1 of the paper).
    ``criterion(output, target)`` returns a scalar. All arguments are those of :class:`apo.Tuner`.

    Example:
        >>> import apo, torch
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
        >>> tuner = apo.APO(optimizer, model, torch.nn.functional.cross_entropy, total_steps=20, interval=2)
        >>> x, y = torch.randn(16, 4), torch.randint(3, (16,))
        >>> losses = [float(tuner.step(x, y)) for _ in range(20)]
        >>> losses[-1] < losses[0] and optimizer.param_groups[0]["lr"] > 1e-3
        True
    """

    _no_recording = (
        "a meta-step was due but its training batch is unknown: call tuner.backward(...) before tuner.step()"
    )
    _recordings: list[Recording]  # the passes whose gradients the next step uses
    _left_gradients = True  # whether the last pass did, see `leaves_gradients`
    _stepping = False
    _has_stepped = False  # a GradScaler leaves a step out after an overflow

    def _in_old_form(self, optimizer: Any, model: Any, criterion: Any, loss: Any) -> tuple[Any, Any, Any]:
        is_network = isinstance(optimizer, nn.Module) and next(optimizer.parameters(), None) is not None
        if is_network and isinstance(model, (Rule, Optimizer)):
            warnings.warn(
                "apo.APO takes the optimizer first, as apo.attach does: write APO(optimizer, model, criterion); the "
                "old order will be removed",
                ApoWarning,
                stacklevel=3,
            )
            optimizer, model = model, optimizer
        return super()._in_old_form(optimizer, model, criterion, loss)

    def _install_hooks(self) -> None:
        super()._install_hooks()
        self._before = self._hooks.add(self.optimizer.register_step_pre_hook, self._before_step)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Note that the optimizer steps; refuse a step that this tuner would not notice."""
        if not self._stepping:
            raise RuntimeError(
                "optimizer.step() was called on the optimizer of apo.APO, which would not learn from it: call "
                "tuner.step(), or use apo.attach for a loop that steps the optimizer itself"
            )
        self._has_stepped = not (self.is_meta_step() and unscale_fused(optimizer))
        if self._theta is not None:
            self.engine.note_gradients(self.steps, self._theta)

    def step(self, inputs: Any = None, target: Any = None) -> Tensor | None:
        """Take one training step: forward, backward, optimizer step and, when it is time, meta-step.

        Without arguments only the optimizer steps, on gradients from :meth:`backward` (accumulated, clipped, ...).

        Args:
            inputs: A tensor, a tuple of positional arguments or a mapping of keyword arguments of the network.
            target: The second argument of the criterion.

        Returns:
            The training loss, detached; None without arguments.
        """
        loss = None
        if inputs is not None:
            self.optimizer.zero_grad()
            self._forget()
            loss = self.backward(inputs, target)
        scaler = self.engine.scaler
        if scaler is None and self._skips and takes_gradients_away(self._parameters()):  # a scaler does so by itself
            self._skip()
            return loss
        self._stepping, self._has_stepped = True, False
        try:
            # Hooks of others see the step that is taken in the end, not the one that is measured.
            with hooks_of_others_around(self.optimizer, self._before, lambda: self._has_stepped):
                place = self._place()
                self._recordings = [recording.stepped_from(place) for recording in self._recordings]
                self._begin_step()
                if scaler is None:
                    self.optimizer.step()
                else:
                    scaler.step(self.optimizer)
                if self._has_stepped:
                    self._finish_step()
                else:
                    self._abandon()  # the scaler found an overflow and left the step out
        except BaseException:
            self._abandon()  # Ctrl-C, say: the weights that were measured must not be seen
            raise
        finally:
            self._stepping = False
        if scaler is not None:
            scaler.update()
        self._forget()
        return loss

    def backward(self, inputs: Any, target: Any = None, *, weight: float = 1.0) -> Tensor:
        """Run the network forward and backward and add to the gradients: one micro-batch.

        Call it once or several times (with ``weight=1/n`` for the mean of n), clip the gradients if you like, then call
        :meth:`step` without arguments and ``optimizer.zero_grad()``.

        Args:
            inputs: See :meth:`step`.
            target: See :meth:`step`.
            weight: Factor of this loss in the objective.

        Returns:
            The loss of the micro-batch, detached and without the weight.
        """
        recording = self._new_recording(inputs, target) if self._wants_recording() else None
        if self._recordings and self._left_gradients and self._gradients_are_clear():
            self._forget()  # the passes of a step that was not taken
        args, kwargs = as_arguments(inputs)
        with torch.enable_grad():
            output = self.model(*args, **kwargs)
            criterion = self.engine.criterion
            loss = own_loss(output) if criterion is None else criterion(output, target)
            _check_scalar(loss)
            scaled = loss * weight if weight != 1.0 else loss
            scaler = self.engine.scaler
            (scaled if scaler is None else scaler.scale(scaled)).backward()
        if recording is not None:
            self._left_gradients = not are_several() or leaves_gradients(self.model)
            seen = own_prediction(output) if criterion is None else output
            prediction = tree_map(Tensor.detach, seen) if self.fsd_batches.is_same else None
            self._recordings.append(recording.ended(loss.detach(), prediction, self._place(), weight=weight))
        return loss.detach()

    def record(self, inputs: Any, target: Any = None) -> None:
        """Announce a forward and backward pass that ran elsewhere, such as in a CUDA graph, before an ordinary step.

        The gradients are in place and :meth:`step` without arguments follows, exactly as after :meth:`backward`: the
        batch may be needed as B' of the next meta-step. A step for which :meth:`is_meta_step` holds needs
        :meth:`backward`, because its forward pass will run again with the same random numbers.

        Args:
            inputs: See :meth:`step`.
            target: See :meth:`step`.

        Raises:
            ReplayError: The coming step is a meta-step.

        Example:
            >>> import apo, torch
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> tuner = apo.APO(optimizer, model, torch.nn.functional.mse_loss, interval=10)
            >>> x, y = torch.ones(4, 2), torch.zeros(4, 1)
            >>> loss = tuner.step(x, y)  # the first step is a meta-step
            >>> tuner.optimizer.zero_grad()
            >>> torch.nn.functional.mse_loss(model(x), y).backward()
            >>> tuner.record(x, y)
            >>> tuner.step()
            >>> tuner.steps
            2
        """
        if self.is_meta_step():
            raise ReplayError(
                f"step {self.steps} is a meta-step, whose pass cannot be recorded: call backward() for it"
            )
        if self._wants_recording():
            self._recordings.append(self._new_recording(inputs, target))

    def _new_recording(self, inputs: Any, target: Any) -> Recording:
        """Describe a training pass: the network on ``inputs``, the criterion on its output and ``target``."""
        call = as_call(inputs)
        if self.is_meta_step():
            call = call.sealed(self.model)
        autocast = Autocast.capture(self.device.type)
        if self.engine.criterion is None:
            return Recording((call,), None, {}, (), autocast)
        return Recording((call,), (None, target), {}, (Slot(0),), autocast)

    def _used_recordings(self) -> list[Recording]:
        return self._recordings

    def _forget(self) -> None:
        self._recordings = []


def _check_scalar(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"criterion must return one number as a tensor, got {what}: return the mean alone")
