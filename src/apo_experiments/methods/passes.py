"""One forward and backward pass, which leaves the gradients in ``.grad``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn

from apo.passes.graphs import GraphedNetwork
from apo.passes.recording import as_call
from apo_experiments.methods.hyper import choose
from apo_experiments.problem import Problem

#: Precisions; only "bf16-autocast" changes what a pass does, the others are the network's own.
PRECISIONS = ("float32", "bf16-autocast", "bf16", "fp16")

Loss = Callable[[Any, Any], Tensor]


class TrainingPass(ABC):
    """Computes the loss of a batch and its gradients."""

    @abstractmethod
    def __call__(self, inputs: Any, target: Any) -> Tensor:
        """Overwrite ``.grad`` of every parameter and return the detached loss."""


@final
class EagerPass(TrainingPass):
    """The ordinary way.

    Args:
        model: The network.
        loss: Its loss function.
        precision: One of :data:`PRECISIONS`.
    """

    def __init__(self, model: nn.Module, loss: Loss, precision: str = "float32") -> None:
        self._model, self._loss, self._precision = model, loss, precision

    def __call__(self, inputs: Any, target: Any) -> Tensor:
        """See :class:`TrainingPass`."""
        for parameter in self._model.parameters():
            parameter.grad = None
        with forward_context(self._model, self._precision):
            loss = self._loss(forward(self._model, inputs), target)
        loss.backward()
        return loss.detach()


def forward(model: nn.Module, inputs: Any) -> Any:
    """Call a network with a batch: a tensor, a tuple of arguments or a mapping of keyword arguments."""
    call = as_call(inputs)
    return model(*call.args, **call.kwargs)


def device_of(model: nn.Module) -> torch.device:
    """Return where a network's parameters live."""
    return next(model.parameters()).device


def forward_context(model: nn.Module, precision: str) -> AbstractContextManager:
    """Return the context in which forward passes run."""
    return torch.autocast(device_of(model).type, torch.bfloat16, enabled=precision == "bf16-autocast")


def training_pass(problem: Problem, hyper: Mapping[str, Any]) -> TrainingPass:
    """Return the fastest pass that this machine and these hyperparameters allow."""
    from apo_experiments.methods.graphed import GraphedPass

    precision = choose("precision", hyper["precision"], PRECISIONS)
    return (GraphedPass if _graphed(problem, hyper) else EagerPass)(_network(problem), problem.loss, precision)


def network_for_meta_steps(problem: Problem, hyper: Mapping[str, Any]) -> nn.Module:
    """Return the network, or a stand-in that runs as fast as this machine and these hyperparameters allow."""
    return GraphedNetwork(_network(problem)) if _graphed(problem, hyper) else _network(problem)


def _network(problem: Problem) -> nn.Module:
    return problem.model if problem.trained_as is None else problem.trained_as


def _graphed(problem: Problem, hyper: Mapping[str, Any]) -> bool:
    return hyper["cuda_graph"] and device_of(problem.model).type == "cuda"
