"""Accelerate: one line after ``accelerator.prepare``.

Before it, ``apo.attach(optimizer, model, criterion, scaler=accelerator.scaler)`` does the same without the logging.
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
    """Let a prepared training loop learn its learning rate; nothing after this line has to change.

    Accumulation through ``accelerator.accumulate``, its loss scale and its mixed precision are seen as they happen. The
    tuner's state travels inside the optimizer's, so ``save_state`` and ``load_state`` carry it.

    Args:
        accelerator: The accelerator of the loop.
        optimizer: What ``accelerator.prepare`` returned for the optimizer (or the optimizer itself).
        model: The network that the loop calls.
        criterion: The loss module that the loop calls (a function is made one by :func:`apo.criterion`); None if the
            network's output carries its ``loss``.
        rule: Makes a rule around the optimizer, such as ``apo.LearningRate.paper``;
            None for the optimizer's own.
        log: Whether ``accelerator.log``, and so its trackers, get the figures of every meta-step.
        **options: See :class:`apo.Tuner`; ``save_batch`` is True here, so that a resume is exact.

    Returns:
        The tuner; ``detach()`` takes everything off again.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> model = torch.nn.Linear(4, 3)
        >>> prepared = torch.optim.AdamW(model.parameters())
        >>> tuner = attach(SimpleNamespace(scaler=None), prepared, model, torch.nn.CrossEntropyLoss())
        >>> tuner.optimizer is prepared
        True
    """
    own = getattr(optimizer, "optimizer", optimizer)  # inside the wrapper, whose steps need not be steps
    if own is not optimizer and is_scheduled(optimizer):
        note_scheduler(own)
    options = {"scaler": accelerator.scaler, "save_batch": True} | options
    tuner = attach_to_optimizer(own if rule is None else rule(own), model, criterion, **options)
    if log:
        tuner.on_meta_step(log_to(accelerator))
    return tuner


def log_to(accelerator: Accelerator, prefix: str = "apo") -> Callable[[MetaStep], None]:
    """Make a listener that gives every figure of every meta-step to ``accelerator.log``.

    Args:
        accelerator: The accelerator, whose trackers then have the figures.
        prefix: First part of the names.

    Example:
        >>> from types import SimpleNamespace
        >>> accelerator = SimpleNamespace(log=lambda values, step: print(values["apo/lr/0"], step))
        >>> log_to(accelerator)(MetaStep(10, 2.0, 1.9, 0.01, 0.5, 1.903, 0.2, (0.1,), True))
        0.1 10
    """
    return lambda record: accelerator.log(record.scalars(prefix), step=record.step)
