"""Hugging Face Trainer: one line between ``Trainer(...)`` and ``trainer.train()``.

If you build the optimizer yourself, ``apo.attach(optimizer, model)`` before
``Trainer(..., optimizers=(optimizer, None))`` does the same without logging. (A ``TrainerCallback`` would be too late:
it first sees the optimizer after a checkpoint has been loaded.)
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
    """Learn the learning rate of a Trainer; its schedule multiplies the learned rate.

    The optimizer is built now, as ``trainer.train()`` would build it. The loss is the one that the network returns or,
    if the Trainer has one, its ``compute_loss_func``; labels of -100 are ignored in every term. The tuner's state is
    part of the optimizer's, so ``trainer.train(resume_from_checkpoint=...)`` resumes exactly. Under ``torchrun``
    repeated passes go through the Trainer's wrapper, which averages their gradients.

    Args:
        trainer: A trainer that has not started.
        rule: Builds a rule from the optimizer, such as ``apo.LearningRate.paper``; None for the optimizer's default.
        log: Whether to log every meta-step with ``trainer.log``.
        **options: See :class:`apo.Tuner`; ``total_steps="auto"`` is computed from the trainer's arguments, and
            ``save_batch`` is True here, so that a resume is exact.

    Returns:
        The tuner; ``detach()`` removes it again.

    Raises:
        ValueError: The Trainer will shard its network, copy it to several GPUs or rebuild it when training starts.

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
            f"trainer must run without FSDP and with one GPU per process, got {trainer.args.n_gpu} GPUs: start it with "
            "torchrun, for DistributedDataParallel, or use fully_shard in your own loop"
        )
    if trainer.model_init is not None:
        raise ValueError(
            "trainer must be given a model, got model_init, which builds another network when training starts: "
            "pass model=model_init()"
        )
    optimizer = trainer.create_optimizer()
    if trainer.compute_loss_func is not None and not isinstance(trainer.compute_loss_func, nn.Module):
        trainer.compute_loss_func = criterion(trainer.compute_loss_func)
    # The Trainer multiplies the loss by the number of processes; a disabled scaler says that this is no loss scale.
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
    """Return how many steps the trainer will take; its own method for this differs between releases."""
    arguments = trainer.args
    if arguments.max_steps > 0:
        return arguments.max_steps
    with torch.random.fork_rng(devices=()):  # building a loader may draw a seed
        batches = len(trainer.get_train_dataloader())
    steps_per_epoch = math.ceil(batches / arguments.gradient_accumulation_steps)
    return math.ceil(arguments.num_train_epochs * steps_per_epoch)


def log_to(trainer: Trainer, prefix: str = "apo") -> Callable[[MetaStep], None]:
    """Return a callback for ``on_meta_step`` that passes every value to ``trainer.log``.

    Args:
        trainer: The trainer, whose ``state.log_history`` and reports get the values.
        prefix: First part of the names.

    Example:
        >>> from types import SimpleNamespace
        >>> trainer = SimpleNamespace(log=lambda values: print(values["apo/lr/0"]))
        >>> log_to(trainer)(MetaStep(10, 2.0, 1.9, 0.01, 0.5, 1.903, 0.2, (0.1,), True))
        0.1
    """
    return lambda record: trainer.log(record.scalars(prefix))
