"""Hugging Face Trainer: one line between ``Trainer(...)`` and ``trainer.train()``.

For an optimizer that you build yourself, ``apo.attach(optimizer, model)`` before
``Trainer(..., optimizers=(optimizer, None))`` does the same without the logging. (A ``TrainerCallback`` would come too
late: it first sees the optimizer after a checkpoint has been loaded into it.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from apo.core.records import MetaStep
from apo.loop.attach import Attached, criterion
from apo.loop.attach import attach as attach_to_optimizer
from apo.rules.base import Rule

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["attach", "log_to"]


def attach(
    trainer: Trainer, rule: Callable[[Optimizer], Rule] | None = None, log: bool = True, **options: Any
) -> Attached:
    """Let a Trainer learn its learning rate; its schedule multiplies what is learned.

    The optimizer is made now, as ``trainer.train()`` would make it. The loss is the one that the network returns or, if
    the Trainer has one, its ``compute_loss_func``; labels of -100 count in no term. The tuner's state travels inside
    the optimizer's, so ``trainer.train(resume_from_checkpoint=...)`` resumes exactly. Under ``torchrun`` the repeated
    passes go through the wrapper that the Trainer puts around its network, which averages their gradients.

    Args:
        trainer: A trainer that has not started.
        rule: Makes a rule around its optimizer, such as ``apo.LearningRate.paper``;
            None for the optimizer's own.
        log: Whether ``trainer.log`` gets the figures of every meta-step.
        **options: See :class:`apo.Tuner`; ``total_steps="auto"`` is what the trainer's arguments amount to, and
            ``save_batch`` is True here, so that a resume is exact.

    Returns:
        The tuner; ``detach()`` takes everything off again.

    Raises:
        ValueError: The Trainer will shard its network, copy it to several GPUs or make another when training starts.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> model = torch.nn.Linear(4, 3)  # in place of a Hugging Face model and, next, of a Trainer
        >>> trainer = SimpleNamespace(model=model, is_fsdp_enabled=False, accelerator=None, compute_loss_func=None)
        >>> trainer.args, trainer.model_init = SimpleNamespace(n_gpu=1), None
        >>> trainer.create_optimizer = lambda: torch.optim.AdamW(model.parameters())
        >>> attach(trainer, interval=5).interval
        5
    """
    if trainer.is_fsdp_enabled or trainer.args.n_gpu > 1:
        raise ValueError(
            f"trainer must run without FSDP and with one GPU a process, got {trainer.args.n_gpu} GPUs: start it with "
            "torchrun, for DistributedDataParallel, or use fully_shard in your own loop"
        )
    if trainer.model_init is not None:
        raise ValueError(
            "trainer must be given a model, got model_init, with which it makes another network and another optimizer "
            "when training starts: pass model=model_init()"
        )
    optimizer = trainer.create_optimizer()
    if trainer.compute_loss_func is not None and not isinstance(trainer.compute_loss_func, nn.Module):
        trainer.compute_loss_func = criterion(trainer.compute_loss_func)
    # Without a scaler the weight of a loss, which the Trainer multiplies by the number of processes, is no loss scale.
    scaler = getattr(trainer.accelerator, "scaler", None) or torch.amp.GradScaler(enabled=False)
    options = {"scaler": scaler, "save_batch": True} | options
    if options.get("total_steps") == "auto":
        options["total_steps"] = _expected_steps(trainer)
    rule_or_optimizer = optimizer if rule is None else rule(optimizer)
    model = cast(nn.Module, trainer.model)
    tuner = attach_to_optimizer(rule_or_optimizer, model, trainer.compute_loss_func, **options)
    if log:
        tuner.on_meta_step(log_to(trainer))
    return tuner


def _expected_steps(trainer: Trainer) -> int:
    """Return how many steps the trainer will take, counted as it does: its releases differ in whom to ask for it."""
    arguments = trainer.args
    if arguments.max_steps > 0:
        return arguments.max_steps
    with torch.random.fork_rng(devices=()):  # a loader may draw its seed when it is made
        batches = len(trainer.get_train_dataloader())
    steps_per_epoch = math.ceil(batches / arguments.gradient_accumulation_steps)
    return math.ceil(arguments.num_train_epochs * steps_per_epoch)


def log_to(trainer: Trainer, prefix: str = "apo") -> Callable[[MetaStep], None]:
    """Make a listener that gives every figure of every meta-step to ``trainer.log``.

    Args:
        trainer: The trainer, whose ``state.log_history`` and reports then have the figures.
        prefix: First part of the names.

    Example:
        >>> from types import SimpleNamespace
        >>> trainer = SimpleNamespace(log=lambda values: print(values["apo/lr/0"]))
        >>> log_to(trainer)(MetaStep(10, 2.0, 1.9, 0.01, 0.5, 1.903, 0.2, (0.1,), True))
        0.1
    """
    return lambda record: trainer.log(record.scalars(prefix))
