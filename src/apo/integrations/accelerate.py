"""Accelerate: one line after ``accelerator.prepare``.

``apo.attach(optimizer, model, criterion, scaler=accelerator.scaler)`` before it does the same without logging.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from apo.core.records import MetaStep
from apo.loop.attach import Attached
from apo.loop.attach import attach as attach_to_optimizer
from apo.rules.base import Rule
from apo.rules.param_groups import is_scheduled, note_scheduler

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["attach", "log_to"]


def attach(
    accelerator: Accelerator,
    optimizer: Optimizer,
    model: nn.Module,
    criterion: nn.Module | None = None,
    rule: Callable[[Optimizer], Rule] | None = None,
    log: bool = True,
    **options: Any,
) -> Attached:
    """Learn the learning rate of a prepared training loop; nothing after this line has to change.

    Gradient accumulation, loss scaling and mixed precision of the accelerator are taken into account. The tuner's state
    is part of the optimizer's, so ``save_state`` and ``load_state`` include it.

    Args:
        accelerator: The accelerator of the loop.
        optimizer: What ``accelerator.prepare`` returned for the optimizer (or the optimizer itself).
        model: The network that the loop calls.
        criterion: The loss module that the loop calls (:func:`apo.criterion` makes one of a function); None if the
            network's output has a ``loss``.
        rule: Builds a rule from the optimizer, such as ``apo.LearningRate.paper``; None for the optimizer's default.
        log: Whether to log every meta-step with ``accelerator.log``.
        **options: See :class:`apo.Tuner`; ``save_batch`` is True here, so that a resume is exact.

    Returns:
        The tuner; ``detach()`` removes it again.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> model = torch.nn.Linear(4, 3)
        >>> prepared = torch.optim.AdamW(model.parameters())
        >>> tuner = attach(SimpleNamespace(scaler=None), prepared, model, torch.nn.CrossEntropyLoss())
        >>> tuner.optimizer is prepared
        True
    """
    own = getattr(optimizer, "optimizer", optimizer)  # the wrapper's step() does nothing while gradients accumulate
    # A scheduler built on the wrapper marks the wrapper only, but apo reads the rates of the inner optimizer.
    if own is not optimizer and is_scheduled(optimizer):
        note_scheduler(own)
    options = {"scaler": accelerator.scaler, "save_batch": True} | options
    tuner = attach_to_optimizer(own if rule is None else rule(own), model, criterion, **options)
    if log:
        tuner.on_meta_step(log_to(accelerator))
    return tuner


def log_to(accelerator: Accelerator, prefix: str = "apo") -> Callable[[MetaStep], None]:
    """Return a callback for ``on_meta_step`` that passes every value to ``accelerator.log``.

    Args:
        accelerator: The accelerator with the trackers.
        prefix: First part of the names.

    Example:
        >>> from types import SimpleNamespace
        >>> accelerator = SimpleNamespace(log=lambda values, step: print(values["apo/lr/0"], step))
        >>> log_to(accelerator)(MetaStep(10, 2.0, 1.9, 0.01, 0.5, 1.903, 0.2, (0.1,), True))
        0.1 10
    """
    return lambda record: accelerator.log(record.scalars(prefix), step=record.step)
