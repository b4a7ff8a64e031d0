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
from apo.preconditioners.bundled import Bundled, Groups, LookAhead
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
    ) -> tuple[dict[Tensor, Tensor], LookAhead]:
        """Return P g, in the graph's memory; to look ahead, -P g, copied out of it."""
        name = "displacements" if look_ahead else "directions"
        graph = self._product(name, groups, gradients, lambda given: self._plain.multiply(groups, given, look_ahead))
        if graph is None:
            return self._plain.multiply(groups, gradients, look_ahead)
        results, kept = graph(gradients.values())
        if look_ahead:  # the next replay would overwrite displacements that the caller still holds
            results = dict(zip(results, copies(list(results.values())), strict=True))
        return results, kept

    def pull_back(self, look_ahead: LookAhead, cotangents: Mapping[Tensor, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Pull back, by a graph if the displacements came from one."""
        graph, params = self._graphs.get("displacements"), list(cotangents)
        if graph is not None and graph.results[1] is look_ahead:
            # This can be recorded because replayed displacements leave their results at the same addresses each time.
            graph = self._graph(
                "pull_back",
                lambda values: self._plain.pull_back(look_ahead, dict(zip(params, values, strict=True))),
                cotangents.values(),
            )
            if graph is not None:
                return graph(cotangents.values())
        return self._plain.pull_back(look_ahead, cotangents)

    def observe(self, groups: Groups, gradients: Mapping[Tensor, Tensor], sampled: bool = False) -> None:
        """Update the joint blocks; from gradients at sampled targets, which are rare, eagerly."""
        graph = None
        if not sampled:
            graph = self._product("observe", groups, gradients, lambda given: self._plain.observe(groups, given))
        if graph is None:
            self._plain.observe(groups, gradients, sampled)
        else:
            graph(gradients.values())

    def mean_eigenvalues(self) -> dict[str, Tensor]:
        """Return the mean eigenvalues, in the order of the plan."""
        graph = self._graphs.get("displacements") and self._graph(
            "mean_eigenvalues", lambda _: self._plain.mean_eigenvalues(), ()
        )
        return self._plain.mean_eigenvalues() if graph is None else graph()

    def _product(
        self, name: str, groups: Groups, raw: Mapping[Tensor, Tensor], function: Callable[[dict[Tensor, Tensor]], Any]
    ) -> _Graph | None:
        """Return a recorded function of the gradients, or None if it cannot be replayed at this step."""
        if not raw or not self._possible or torch.cuda.is_current_stream_capturing():
            return None
        # A graph reads weights and factors at fixed addresses, and its rates are constants.
        options = [(g["initial_step"], g["weight_decay"], g["decoupled_weight_decay"]) for g in groups]
        places = [p.data_ptr() for p in raw]
        tensors = [tensor.data_ptr() for layer in self._layers for tensor in layer.block.tensors.values()]
        kind = (options, places, tensors)
        if kind != self._kind:
            self._kind, self._seen = kind, 0
            self._graphs.clear()
        self._seen += 1
        if self._seen <= _WARM_UP:
            return None
        return self._graph(name, lambda gradients: function(dict(zip(raw, gradients, strict=True))), raw.values())

    def _graph(self, name: str, function: Callable, inputs: Iterable[Tensor]) -> _Graph | None:
        if name not in self._graphs and self._possible:
            # If recording fails once, do not try again.
            graph = recorded("the preconditioner", lambda: _Graph(function, inputs))
            if graph is None:
                self._possible = False
                self._graphs.clear()
            else:
                self._graphs[name] = graph
        return self._graphs.get(name)
