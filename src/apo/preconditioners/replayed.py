"""The product P g as a CUDA graph: one launch instead of dozens.

In a typical training step the GPU waits for launches, so the preconditioner's cost is its launches, not its arithmetic.
The operations are the same at every step, so they are recorded once and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from apo.passes.graphs import capture, recorded
from apo.preconditioners.bundled import Bundled, Groups, Kept
from apo.preconditioners.plan import Layer
from apo.vectors import assign_, copies

__all__ = ["Replayed", "pays"]

#: Eager steps before recording, because libraries choose their algorithms in the first ones.
_WARM_UP = 3
#: The largest number of weights for which a graph pays: larger networks do not wait for launches, and a graph keeps its
#: intermediate results in memory.
_LARGEST = 2**26


def pays(layers: Sequence[Layer]) -> bool:
    """Return whether replaying is worth its memory: on one GPU, for a network that is not too large.

    Example:
        >>> from apo.preconditioners import plan_layers
        >>> pays(plan_layers(torch.nn.Linear(2, 2)))
        False
    """
    parameters = [p for layer in layers for p in layer.params]
    one_gpu = len({p.device for p in parameters}) == 1 and parameters[0].is_cuda
    return one_gpu and sum(p.numel() for p in parameters) <= _LARGEST


class _Graph:
    """A recorded function of tensors; the next call overwrites its results."""

    def __init__(self, function: Callable[[list[Tensor]], Any], inputs: Iterable[Tensor]) -> None:
        self._inputs = copies(list(inputs))
        self._graph = torch.cuda.CUDAGraph()
        with capture(self._graph):
            self.results = function(self._inputs)

    def __call__(self, inputs: Iterable[Tensor] = ()) -> Any:
        assign_(self._inputs, list(inputs))
        self._graph.replay()
        return self.results


@final
class Replayed:
    """Records what :class:`Bundled` does, and replays it as long as the steps stay the same.

    Steps are the same if the same parameters have gradients, the options of their groups that affect P are unchanged
    and no tensor has been replaced. Otherwise, and while another CUDA graph is being recorded, everything runs eagerly.
    The gradients that :meth:`pull_back` returns are valid until its next call.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._plain = Bundled(layers)
        self._graphs: dict[str, _Graph] = {}
        self._kind: tuple | None = None
        self._seen = 0
        self._possible = True

    def multiply(
        self, groups: Groups, gradients: Mapping[Tensor, Tensor], look_ahead: bool = False
    ) -> tuple[dict[Tensor, Tensor], Kept]:
        """Return P g, in the graph's memory; to look ahead, -P g, copied out of it."""
        if not self._is_as_before(groups, gradients):
            return self._plain.multiply(groups, gradients, look_ahead)
        name = "displacements" if look_ahead else "directions"
        found, kept = self._replay(name, lambda given: self._plain.multiply(groups, given, look_ahead), gradients)
        if look_ahead:  # the next replay would overwrite displacements that the caller still holds
            found = dict(zip(found, copies(list(found.values())), strict=True))
        return found, kept

    def pull_back(self, kept: Kept, cotangents: Mapping[Tensor, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Pull back, by a graph if the displacements came from one."""
        graph = self._graphs.get("displacements")
        if graph is None or graph.results[1] is not kept:
            return self._plain.pull_back(kept, cotangents)
        # This can be recorded because replayed displacements leave their results at the same addresses each time.
        return self._replay("pull_back", lambda given: self._plain.pull_back(kept, given), cotangents)

    def observe(self, groups: Groups, gradients: Mapping[Tensor, Tensor], sampled: bool = False) -> None:
        """Update the joint blocks; from gradients at sampled targets, which are rare, eagerly."""
        if sampled or not self._is_as_before(groups, gradients):
            self._plain.observe(groups, gradients, sampled)
        else:
            self._replay("observe", lambda given: self._plain.observe(groups, given), gradients)

    def mean_eigenvalues(self) -> dict[str, Tensor]:
        """Return the mean eigenvalues, in the order of the plan."""
        if "displacements" not in self._graphs:
            return self._plain.mean_eigenvalues()
        return self._replay("mean_eigenvalues", lambda _: self._plain.mean_eigenvalues(), {})

    def _is_as_before(self, groups: Groups, gradients: Mapping[Tensor, Tensor]) -> bool:
        """Return whether graphs of these gradients can be recorded and replayed; if not, drop those of others."""
        if not gradients or not self._possible or torch.cuda.is_current_stream_capturing():
            return False
        # A graph reads weights and factors at fixed addresses, and its rates are constants.
        options = [(g["initial_step"], g["weight_decay"], g["decoupled_weight_decay"]) for g in groups]
        places = [p.data_ptr() for p in gradients]
        tensors = [tensor.data_ptr() for layer in self._layers for tensor in layer.block.tensors.values()]
        kind = (options, places, tensors)
        if kind != self._kind:
            self._kind, self._seen = kind, 0
            self._graphs.clear()
        self._seen += 1
        return self._seen > _WARM_UP

    def _replay(
        self, name: str, function: Callable[[Mapping[Tensor, Tensor]], Any], tensors: Mapping[Tensor, Tensor]
    ) -> Any:
        """Call a function of tensors by its graph, which is recorded first if there is none yet."""
        if name not in self._graphs and self._possible:

            def of_values(values: list[Tensor]) -> Any:  # the keys, which are parameters, stay the same
                return function(dict(zip(tensors, values, strict=True)))

            graph = recorded("the preconditioner", lambda: _Graph(of_values, tensors.values()))
            if graph is None:  # if recording fails once, do not try again
                self._possible = False
                self._graphs.clear()
            else:
                self._graphs[name] = graph
        return self._graphs[name](tensors.values()) if name in self._graphs else function(tensors)
