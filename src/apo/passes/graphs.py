"""CUDA graphs: recording one safely, and a network whose passes are graphs, so that replaying takes one call.

A meta-step runs the network on two batches, at two points, with two losses. So the network alone is captured, as two
graphs, and replaces itself in any of these passes. Losses stay eager, they are a few kernels.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from apo.errors import ApoWarning
from apo.passes.isolation import every_module
from apo.torch_internals import own_buffers, own_parameters
from apo.vectors import copies

__all__ = ["GraphedNetwork", "capture", "fresh_leaves", "recorded"]

#: Eager passes on batches of one shape before the graphs are captured.
_WARM_UP = 3

Recorded = TypeVar("Recorded")


@final
class GraphedNetwork(nn.Module):
    """A network that replays CUDA graphs in training mode, if it maps one tensor to one tensor.

    Batches of another shape, evaluation, networks off CUDA and networks that draw random numbers run eagerly. A graph
    has one set of activations, so a backward pass has to follow its forward pass before the next one. It reads and
    writes fixed memory: it is captured again if weights have moved in memory or a layer has changed its mode.

    Example:
        >>> network = GraphedNetwork(nn.Linear(2, 1))
        >>> network(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._possible = True  # as far as is known
        self._graphs: _Graphs | None = None
        self._conditions: tuple | None = None  # of the last pass in the warm-up, and of the graphs
        self._seen = 0  # passes in the same conditions

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedNetwork:
        """Copy the network; graphs cannot be copied and are captured again."""
        return GraphedNetwork(copy.deepcopy(self.network, memo))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network."""
        if not (self._possible and self.network.training and not kwargs and _is_plain_batch(args)):
            return self.network(*args, **kwargs)
        inputs = args[0]
        conditions = _conditions(self.network, inputs)
        if self._graphs is not None and conditions[0] != self._conditions[0]:  # type: ignore[index]
            self._graphs = None
        if self._graphs is None and torch.is_grad_enabled():
            self._seen = self._seen + 1 if conditions == self._conditions else 1
            self._conditions = conditions
            if self._seen > _WARM_UP:
                self._graphs = self._captured(inputs)
            if self._graphs is None:
                return self._eager(inputs)
        if self._graphs is None or conditions != self._conditions:
            return self.network(inputs)
        return _Replay.apply(self._graphs, inputs, *self._graphs.parameters)

    def _eager(self, inputs: Tensor) -> Tensor:
        before = torch.cuda.get_rng_state()
        output = self.network(inputs)
        # A captured generator cannot be set back, as a meta-step does to see the same dropout masks again.
        self._possible = isinstance(output, Tensor) and torch.equal(before, torch.cuda.get_rng_state())
        return output

    def _captured(self, inputs: Tensor) -> _Graphs | None:
        parameters = [p for p in self.network.parameters() if p.requires_grad]
        graphs = recorded("the network", lambda: _Graphs(self.network, inputs, parameters))
        self._possible = graphs is not None
        return graphs


class _Graphs:
    """The two graphs and the memory that they read and write."""

    def __init__(self, network: nn.Module, inputs: Tensor, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.inputs = inputs.detach().clone()
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.passes = 0
        torch.clear_autocast_cache()  # every replay has to make its own 16-bit copies of the weights
        torch.cuda.synchronize()
        with fresh_leaves(network) as leaves:
            with capture(self.forward):
                self.output = network(self.inputs)
            self.cotangent = torch.zeros_like(self.output)
            with capture(self.backward, pool=self.forward.pool()):
                self.gradients = _gradients(self.output, [leaves[p] for p in parameters], parameters, self.cotangent)
        torch.clear_autocast_cache()


class _Replay(torch.autograd.Function):
    """Replays the forward graph, and the backward graph in the backward pass. Results are copied out."""

    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, inputs: Tensor, *parameters: Tensor) -> Tensor:
        graphs.inputs.copy_(inputs)
        graphs.forward.replay()
        graphs.passes += 1
        ctx.graphs, ctx.number = graphs, graphs.passes
        return graphs.output.detach().clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple:
        graphs: _Graphs = ctx.graphs
        if ctx.number != graphs.passes:
            raise RuntimeError("another forward pass has overwritten the activations: call backward() before it.")
        graphs.cotangent.copy_(cotangents[0])
        graphs.backward.replay()
        own = iter(copies([gradient for gradient in graphs.gradients if gradient is not None]))
        return None, None, *(None if gradient is None else next(own) for gradient in graphs.gradients)


def _gradients(
    output: Tensor, leaves: Sequence[Tensor], parameters: Sequence[Tensor], cotangent: Tensor
) -> Sequence[Tensor | None]:
    """Return the gradients of the leaves that replace the parameters.

    Raises:
        RuntimeError: The network also reads a parameter from somewhere else.
    """
    found = torch.autograd.grad(output, [*leaves, *parameters], cotangent, allow_unused=True)
    if any(gradient is not None for gradient in found[len(leaves) :]):
        raise RuntimeError("it reads parameters from elsewhere than its modules")
    return found[: len(leaves)]


def _is_plain_batch(args: tuple) -> bool:
    """Return whether the arguments are one tensor on a GPU that needs no gradient."""
    return len(args) == 1 and isinstance(args[0], Tensor) and args[0].is_cuda and not args[0].requires_grad


def _conditions(network: nn.Module, inputs: Tensor) -> tuple[tuple, tuple]:
    """Return what graphs of a network depend on, and what those of its passes on such batches do."""
    modules = every_module([network])
    tensors = [t for m in modules for t in (*own_parameters(m).values(), *own_buffers(m).values()) if t is not None]
    of_network = (
        tuple(module.training for module in modules),
        tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in tensors),
    )
    kind = inputs.device.type
    of_batch = (tuple(inputs.shape), inputs.dtype, inputs.device, torch.is_autocast_enabled(kind))
    return of_network, (*of_batch, torch.get_autocast_dtype(kind))


@contextmanager
def fresh_leaves(network: nn.Module) -> Iterator[dict[Tensor, nn.Parameter]]:
    """Replace the parameters of a network by new ones over the same memory, and put the old ones back at the end.

    As long as any autograd graph leads to a parameter, autograd keeps the stream on which its gradients accumulate. A
    backward pass that is recorded on another stream would have to wait for that one, which breaks the recording. New
    parameters have no autograd history and no hooks.

    Yields:
        The new parameters, by the old ones.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> with fresh_leaves(layer) as leaves:
        ...     layer.weight is leaves[next(iter(leaves))], layer.weight.grad
        (True, None)
    """
    places = [
        (module, name, parameter)
        for module in every_module([network])
        for name, parameter in own_parameters(module).items()
        if parameter is not None
    ]
    leaves: dict[Tensor, nn.Parameter] = {p: nn.Parameter(p.detach(), p.requires_grad) for _, _, p in places}
    try:
        for module, name, parameter in places:
            setattr(module, name, leaves[parameter])
        yield leaves
    finally:
        for module, name, parameter in places:
            setattr(module, name, parameter)


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """Record what is launched inside into ``graph``.

    Like ``torch.cuda.graph``, with three precautions. The garbage collector would break a recording by freeing an old
    graph, so it runs before and is off meanwhile. Other threads, such as one that pins batches in memory or watches
    NCCL, may keep running: by default any CUDA call of theirs would break the recording. And when a recording fails,
    torch leaves CUDA's random stream waiting for its end, so that every later draw fails; a copy of the stream's state,
    at the same place, does not wait.

    Args:
        graph: The graph.
        options: Of ``torch.cuda.graph``: ``pool`` and ``stream``.
    """
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
            yield
    except BaseException:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    finally:
        if collecting:
            gc.enable()


def recorded(what: str, record: Callable[[], Recorded]) -> Recorded | None:
    """Call a function that records graphs; return its result, or None with a warning about ``what`` if it fails.

    Example:
        >>> recorded("the number", lambda: 3)
        3
    """
    try:
        return record()
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0]
        warnings.warn(f"{what} cannot be a CUDA graph and runs eagerly: {reason}", ApoWarning, stacklevel=3)
        return None
