"""One forward and backward pass, which leaves the gradients in ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn

from apo.passes.graphs import GraphedNetwork, capture, recorded
from apo.passes.recording import as_call, tree_map
from apo_experiments.errors import choose
from apo_experiments.problem import Problem

#: Precisions; only "bf16-autocast" changes what a pass does, the others are the network's own.
PRECISIONS = ("float32", "bf16-autocast", "bf16", "fp16")

Loss = Callable[[Any, Any], Tensor]
#: Overwrites ``.grad`` of every parameter for a batch, and returns its detached loss.
TrainingPass = Callable[[Any, Any], Tensor]

#: Eager passes on batches of one shape before the graph is captured.
_WARM_UP = 3


@final
class EagerPass:
    """The ordinary way."""

    def __init__(self, model: nn.Module, loss: Loss, precision: str = "float32") -> None:
        self._model, self._loss, self._precision = model, loss, precision

    def __call__(self, inputs: Any, target: Any) -> Tensor:
        """Compute the gradients of a batch, and return its loss."""
        for parameter in self._model.parameters():
            parameter.grad = None
        with forward_context(self._model, self._precision):
            loss = self._loss(forward(self._model, inputs), target)
        loss.backward()
        return loss.detach()


@final
class GraphedPass:
    """Forward and backward as one CUDA graph, on batches of the captured shape; others run eagerly.

    A small network spends its time launching kernels; a replay launches once. The optimizer's step stays outside the
    graph. It is a few fused kernels, works with every optimizer, schedule and clipping, and lets APO run its meta-steps
    between replays: those run eagerly, with separate gradients. The first passes run eagerly too, as capture requires.
    They are ordinary training steps: nothing is computed twice and no random number is wasted.

    A network that draws random numbers (dropout) runs eagerly: APO resets the generator to repeat the same masks, which
    a captured generator does not allow.

    Without CUDA, with random numbers, or if the network or the loss cannot be captured (they ask the host about
    values), it is an :class:`EagerPass`.
    """

    def __init__(self, model: nn.Module, loss: Loss, precision: str = "float32") -> None:
        self._eager = EagerPass(model, loss, precision)
        self._parameters = list(model.parameters())
        self._possible = torch.cuda.is_available() and all(p.is_cuda for p in self._parameters)
        self._stream = torch.cuda.Stream(self._parameters[0].device) if self._possible else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._shapes: list[tuple] = []
        self._seen = 0
        self._batch: tuple[Any, Any] = (None, None)  # what the graph reads
        self._loss = torch.zeros(())  # what it writes
        self._gradients: list[Tensor | None] = []

    def __call__(self, inputs: Any, target: Any) -> Tensor:
        """Compute the gradients of a batch, and return its loss."""
        if not self._possible:
            return self._eager(inputs, target)
        shapes = _shapes((inputs, target))
        if self._graph is None:
            self._seen = self._seen + 1 if shapes == self._shapes else 1
            self._shapes = shapes
            if self._seen <= _WARM_UP or not self._capture(inputs, target):
                return self._on_side_stream(inputs, target)
        return self._replay(inputs, target) if shapes == self._shapes else self._eager(inputs, target)

    def _on_side_stream(self, inputs: Any, target: Any) -> Tensor:
        """Run where the capture will run, because autograd remembers the stream on which gradients accumulate."""
        if not self._possible:
            return self._eager(inputs, target)
        current, random_state = torch.cuda.current_stream(), torch.cuda.get_rng_state()
        self._stream.wait_stream(current)  # type: ignore[union-attr]
        with torch.cuda.stream(self._stream):  # type: ignore[arg-type]
            loss = self._eager(inputs, target)
        current.wait_stream(self._stream)  # type: ignore[arg-type]
        self._possible = torch.equal(random_state, torch.cuda.get_rng_state())
        return loss

    def _capture(self, inputs: Any, target: Any) -> bool:
        """Record the graph; nothing is computed yet. The gradients it will write are in its own memory."""
        self._batch = tree_map(torch.clone, (inputs, target))
        self._graph = recorded("the training step", self._record)
        self._possible = self._graph is not None
        return self._possible

    def _record(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with capture(graph, stream=self._stream):
            self._loss = self._eager(*self._batch)
        self._gradients = [p.grad for p in self._parameters]
        return graph

    def _replay(self, inputs: Any, target: Any) -> Tensor:
        for own, new in zip(_tensors(self._batch), _tensors((inputs, target)), strict=True):
            own.copy_(new, non_blocking=True)
        self._graph.replay()  # type: ignore[union-attr]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss.clone()


def forward(model: nn.Module, inputs: Any) -> Any:
    """Call a network with a batch: a tensor, a tuple of arguments or a mapping of keyword arguments."""
    call = as_call(inputs)
    return model(*call.args, **call.kwargs)


def forward_context(model: nn.Module, precision: str) -> AbstractContextManager:
    """Return the context in which forward passes run."""
    return torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=precision == "bf16-autocast")


def training_pass(problem: Problem, hyper: Mapping[str, Any]) -> TrainingPass:
    """Return the fastest pass that this machine and these hyperparameters allow."""
    kind = GraphedPass if _graphed(problem, hyper) else EagerPass
    return kind(problem.trained, problem.loss, choose("precision", hyper["precision"], PRECISIONS))


def network_for_meta_steps(problem: Problem, hyper: Mapping[str, Any]) -> nn.Module:
    """Return the network, or a stand-in that runs as fast as this machine and these hyperparameters allow."""
    return GraphedNetwork(problem.trained) if _graphed(problem, hyper) else problem.trained


def _graphed(problem: Problem, hyper: Mapping[str, Any]) -> bool:
    return hyper["cuda_graph"] and problem.parameters[0].is_cuda


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(found.append, tree)
    return found


def _shapes(tree: Any) -> list[tuple]:
    return [(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in _tensors(tree)]
