"""A run in memory: the problem and the optimizer at work on it; and its checkpoint, which an exact resume needs."""

from __future__ import annotations

import hashlib
import io
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from apo.passes.isolation import RandomState, Surface
from apo_experiments import backends
from apo_experiments.errors import UserError
from apo_experiments.files import remove, write_atomically
from apo_experiments.methods import METHODS
from apo_experiments.problem import Budget
from apo_experiments.recipe import Recipe, Setting
from apo_experiments.runs import RunConfig

#: Saving takes at most one part in so many of the time.
_SHARE = 20


@final
class Training:
    """A run in memory: what the loop moves forward, and what a checkpoint holds.

    Attributes:
        step: Steps taken.
        loss_sum: The sum of the losses of this epoch, on the device; NaN as soon as one of them is.
    """

    def __init__(self, config: RunConfig, recipe: Recipe, setting: Setting) -> None:
        assert recipe.task is not None, f"recipe {recipe.name!r} has neither a task nor a compute function"
        if config.epochs < 1:
            raise UserError(f"epochs was {config.epochs}: it must be at least 1.")
        self.config = config
        self.recipe = recipe
        self.device = setting.device
        if config.method not in METHODS:
            raise UserError(f"there is no method {config.method!r}: choose one of {', '.join(sorted(METHODS))}.")
        backends.configure(setting.device, config.options)
        self.problem = recipe.task(config.options, setting)
        self.problem.model.train()
        if config.compiled:
            self.problem = replace(self.problem, trained_as=CompiledNetwork(self.problem.model))
        steps_per_epoch = self.problem.batches.steps_per_epoch
        self.budget = Budget(config.epochs * steps_per_epoch, steps_per_epoch)
        self.stepper = METHODS[config.method].build(self.problem, config.hyper, self.budget)
        # Dropout has its own seed, independent of what building the network and the optimizer has drawn.
        torch.manual_seed(_derived_seed(config.seed))
        self.step = 0
        dtype = torch.float32 if setting.device.type == "mps" else torch.float64
        self.loss_sum = torch.zeros((), dtype=dtype, device=setting.device)
        self._seconds_before = 0.0
        self._clock = time.monotonic()

    def advance(self) -> None:
        """Take one step. Nothing here waits for the device."""
        inputs, target = self.problem.batches.next()
        self.loss_sum.add_(self.stepper.step(inputs, target).detach())
        self.step += 1

    def close_epoch(self) -> dict[str, Any]:
        """Return the row of the epoch that is over, including metrics, and begin the next."""
        row = self.row()
        if not math.isfinite(row["train_loss"]):
            raise FloatingPointError(f"the training loss was {row['train_loss']} before step {self.step}")
        self.loss_sum.zero_()
        with self.off_the_clock():
            return {**row, **self.stepper.telemetry(), **self.evaluate(), "seconds": row["seconds"]}

    def row(self) -> dict[str, Any]:
        """Return the values of the epoch so far."""
        steps = (self.step - 1) % self.budget.steps_per_epoch + 1
        loss = float(self.loss_sum) / steps  # waits for the device, so that the clock below counts finished work
        return {
            "step": self.step,
            "epoch": self.step / self.budget.steps_per_epoch,
            "train_loss": loss,
            "rate": float(self.stepper.rate()),
            "seconds": self.seconds(),
        }

    def evaluate(self) -> dict[str, float]:
        """Return the metrics; evaluation leaves modes, buffers, gradients and random number generators unchanged."""
        modules = [module for module in (self.problem.model, self.problem.loss) if isinstance(module, nn.Module)]
        with Surface(modules, []).undisturbed(), torch.no_grad():
            metrics = self.problem.evaluate(self.problem.model)
        return {name: float(value) for name, value in metrics.items() if value is not None}

    def start_clock(self) -> None:
        """Count seconds from here: building and loading are not training."""
        self._clock = time.monotonic()

    def seconds(self) -> float:
        """Return how long training has taken, in all sessions, without evaluation and saving."""
        return self._seconds_before + time.monotonic() - self._clock

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Do something that is not training."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._clock += time.monotonic() - began

    def state_dict(self) -> dict[str, Any]:
        """Return everything that an exact resume needs, as plain data."""
        return {
            "step": self.step,
            "loss_sum": float(self.loss_sum),
            "seconds": self.seconds(),
            "device": self.device.type,
            "model": self.problem.model.state_dict(),
            "stepper": self.stepper.state_dict(),
            "batches": self.problem.batches.state_dict(),
            "random": RandomState.capture([self.device]).state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where :meth:`state_dict` was called."""
        self.problem.model.load_state_dict(state["model"])
        self.stepper.load_state_dict(state["stepper"])
        self.problem.batches.load_state_dict(state["batches"])
        self.step = int(state["step"])
        self.loss_sum.fill_(state["loss_sum"])
        self._seconds_before = float(state["seconds"])
        if state["device"] == self.device.type:
            RandomState.from_state_dict(state["random"]).restore()  # last: loading the rest may draw numbers


@final
class Checkpoint:
    """The file ``checkpoint.pt`` of one run, replaced atomically, and when it is time to write it again."""

    def __init__(self, directory: Path, every_seconds: float = 60.0) -> None:
        self.path = directory / "checkpoint.pt"
        self.every_seconds = every_seconds
        self._next = time.monotonic() + every_seconds

    def due(self) -> bool:
        """Return whether it is time to save."""
        return time.monotonic() >= self._next

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint by ``state``, plain data and tensors."""
        began = time.monotonic()
        # Through memory: torch's own writer reports a full disk in many ways, a plain write in one.
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        write_atomically(self.path, buffer.getbuffer())
        now = time.monotonic()
        self._next = now + max(self.every_seconds, _SHARE * (now - began) if self.every_seconds else 0.0)

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """Return what was saved, or None if nothing was.

        Tensors saved on the CPU stay there (such as an optimizer's step counts); those from a GPU move to ``device``.
        """
        if not self.path.exists():
            return None
        elsewhere = {location: str(device) for location in ("cuda", "mps", *(f"cuda:{i}" for i in range(64)))}
        try:
            return torch.load(self.path, map_location=elsewhere, weights_only=True)
        except Exception as error:  # a damaged file fails in torch, zipfile or pickle, each in its own way
            raise UserError(
                f"{self.path} is damaged ({type(error).__name__}): delete it, and run the same command to start again."
            ) from error

    def remove(self) -> None:
        """Delete the file when the run no longer needs it."""
        remove(self.path)


@final
class CompiledNetwork(nn.Module):
    """A network whose training passes go through ``torch.compile``: fewer, larger kernels, the same mathematics.

    Evaluation, with batches of another size, runs the network itself.
    """

    def __init__(self, network: nn.Module, backend: str = "inductor") -> None:
        super().__init__()
        self.network = network
        # A compiled function, because a compiled module would be a second module with the same weights.
        self._compiled = torch.compile(network.forward, backend=backend, dynamic=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network."""
        training = self.network.training and torch.is_grad_enabled()
        return (self._compiled if training else self.network)(*args, **kwargs)


def _derived_seed(seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"training {seed}".encode()).digest()[:7], "big")
