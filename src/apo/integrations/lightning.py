"""Lightning with automatic optimization: one callback, or one line in ``configure_optimizers``.

Use the callback, ``Trainer(callbacks=[APOCallback()])``, to leave the module unchanged. Or call :func:`apo.attach` as
in any other loop; the trainer's loggers can receive the values::

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        apo.attach(optimizer, self, self.criterion, on_meta_step=log_to(self))
        return optimizer

Either way the tuner's state is part of the optimizer's, so Lightning's checkpoints include it (with the one line, pass
``save_batch=True`` for a resume that is exact also right before a meta-step). Under the strategy
``"ddp"`` repeated passes go through Lightning's wrapper, which averages their gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from apo.core.records import MetaStep
from apo.loop.attach import Attached, attach
from apo.rules.base import Rule

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["APOCallback", "CallbackHooks", "log_to"]  # noqa: F822  # pyright: ignore[reportUnsupportedDunderAll]


def log_to(module: LightningModule, prefix: str = "apo") -> Callable[[MetaStep], None]:
    """Return a callback for ``on_meta_step`` that passes every value to the loggers of the module's trainer.

    Args:
        module: The module to train; its trainer is looked up at the first meta-step.
        prefix: First part of the names.

    Example:
        >>> from types import SimpleNamespace
        >>> logger = SimpleNamespace(log_metrics=lambda values, step: print(values["apo/lr/0"], step))
        >>> module = SimpleNamespace(trainer=SimpleNamespace(loggers=[logger]))
        >>> log_to(module)(MetaStep(10, 2.0, 1.9, 0.01, 0.5, 1.903, 0.2, (0.1,), True))
        0.1 10
    """

    def log(record: MetaStep) -> None:
        for logger in module.trainer.loggers:
            logger.log_metrics(record.scalars(prefix), record.step)

    return log


class CallbackHooks:
    """The hooks of ``APOCallback``, without Lightning's base class: attach when fitting starts, detach when it ends.

    Args:
        network: Dotted name of the submodule whose output goes to the criterion; ``""`` for the LightningModule itself,
            which its ``training_step`` then calls as ``self(inputs)``.
        criterion: Dotted name of the loss module that ``training_step`` calls (:func:`apo.criterion` makes one of a
            function); None if the network's output has a ``loss``.
        rule: Builds a rule from the optimizer, such as ``apo.LearningRate.paper``; None for the optimizer's default.
        log: Whether to pass the values of every meta-step to the trainer's loggers.
        **options: See :class:`apo.Tuner`; ``total_steps="auto"`` uses the trainer's estimate, and ``save_batch`` is
            True here, so that a resume is exact.

    Attributes:
        tuner: The tuner of the latest fit, to read its ``history``; None before the first.

    Example:
        >>> CallbackHooks(criterion="loss", interval=5).tuner is None
        True
    """

    def __init__(
        self,
        network: str = "",
        criterion: str | None = "criterion",
        rule: Callable[[Optimizer], Rule] | None = None,
        log: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.tuner: Attached | None = None
        self._network, self._criterion = network, criterion
        self._rule, self._log, self._options = rule, log, options

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach: now the optimizer exists, and its state is not yet loaded from a checkpoint."""
        _check(trainer)
        self._detach()  # an interrupted fit may have left a tuner
        optimizer = trainer.optimizers[0]
        criterion = None if self._criterion is None else _submodule(pl_module, "criterion", self._criterion)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        options: dict[str, Any] = {"scaler": scaler, "save_batch": True} | self._options
        if options.get("total_steps") == "auto":
            options["total_steps"] = _expected_steps(trainer)
        rule = optimizer if self._rule is None else self._rule(optimizer)
        self.tuner = attach(rule, _submodule(pl_module, "network", self._network), criterion, **options)
        if self._log:
            self.tuner.on_meta_step(log_to(pl_module))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Detach after fitting, because the next fit builds another optimizer."""
        if stage == "fit":
            self._detach()

    def _detach(self) -> None:
        if self.tuner is not None:
            self.tuner.detach()


def _check(trainer: Trainer) -> None:
    if len(trainer.optimizers) != 1:
        raise ValueError(
            f"configure_optimizers must return one optimizer for APOCallback, got {len(trainer.optimizers)}: "
            "remove the callback and call apo.attach for each of them in configure_optimizers"
        )
    if type(trainer.strategy.model).__name__ == "FullyShardedDataParallel":
        raise ValueError(
            "strategy must not be 'fsdp' for APOCallback, got FullyShardedDataParallel, which flattens the weights: "
            "use 'ddp', or fully_shard in your own loop"
        )


def _expected_steps(trainer: Trainer) -> int:
    steps = trainer.estimated_stepping_batches
    if math.isinf(steps):
        raise ValueError(
            "total_steps must be a number if the trainer has no end, got 'auto': pass max_epochs or max_steps to the "
            "Trainer, or leave total_steps out"
        )
    return int(steps)


def _submodule(module: nn.Module, argument: str, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        raise ValueError(
            f"{argument} must name a submodule of {type(module).__name__}, got {name!r}: wrap a loss function "
            "with apo.criterion, or pass criterion=None for a network that returns its loss"
        ) from None


@functools.cache
def _callback_class() -> type:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        from pytorch_lightning import Callback  # the same package under its older name
    body = {"__doc__": CallbackHooks.__doc__, "__module__": __name__, "__qualname__": "APOCallback"}
    return type("APOCallback", (CallbackHooks, Callback), body)


def __getattr__(name: str) -> Any:
    """Build ``APOCallback`` on first use: its base class is Lightning's, which apo does not depend on."""
    if name == "APOCallback":
        return _callback_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
