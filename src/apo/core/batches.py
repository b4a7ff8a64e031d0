r"""Where the batch B' of the function-space term comes from.

* :class:`PreviousBatch` (default): the training batch of the step before. Different data, and no second loader.
  Of micro-batches it is the last one. A step with several losses of other kinds has one recording for each.
* :class:`SameBatch`: B itself; its outputs are already there, so a meta-step costs less (appendix D of the paper).
* :class:`BatchStream`: any iterable of batches, started again when it ends.

A loop may call its criterion several times before a step, and back-propagate :math:`J = \sum_i w_i L_i`. Then B' has to
stand for that sum on other data. Two cases have to be told apart:

* *Micro-batches* of one mean: every :math:`L_i` is the same function of other data, so one of them, taken alone, says
  on other data what J says.
* *Terms*: two tasks, a residual and a boundary condition, a network that is called twice. One term says little about
  the others, so B' has to be the whole sum on other data, :math:`J' = \sum_i w'_i L'_i`. The function-space term is
  then :math:`\sum_i |w'_i| \rho_i`: each loss has its own divergence, with its own weight, so that the curvature of
  each is in the unit of its loss, and a loss that is written as the sum of two halves learns the same rate.
"""

from __future__ import annotations

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from apo.core.objective import unit_of_loss
from apo.distributed import Processes
from apo.errors import ApoWarning, MissingBatchError
from apo.passes.isolation import PassState, RandomState
from apo.passes.recording import Recording, odd_type

__all__ = [
    "BatchStream", "FSDBatches", "OtherBatch", "PreviousBatch", "SameBatch", "are_terms", "fsd_batches",
    "is_same_sum", "sizes_of",
]  # fmt: skip

_END = object()
#: Largest ratio of the totals of two sums that count as the same: weights may be annealed or drawn at random.
_ALIKE = 1.5


class FSDBatches(ABC):
    """A source of batches for the function-space term."""

    #: Whether the batch of the step before a meta-step has to be kept.
    keeps_previous: bool = False
    #: Whether B' is B, so that the outputs of the training pass serve again.
    is_same: bool = False

    def keep(self, recordings: Sequence[Recording]) -> None:
        """Receive the losses of the step before a meta-step."""

    @abstractmethod
    def draw(self, current: Sequence[Recording], whole: bool = False) -> list[Recording]:
        """Return the batch for a meta-step.

        Args:
            current: The losses of the meta-step.
            whole: Whether they make up the step's loss only together, so that one of them does not stand for it.

        Returns:
            One recording, or one for each loss of a step.
        """

    def state_dict(self, with_batch: bool = True) -> dict[str, Any]:
        """Return what is needed to continue with the same batches.

        Args:
            with_batch: Whether that may be a batch itself.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue where :meth:`state_dict` was called."""


class PreviousBatch(FSDBatches):
    """The training batch of the step before; on the very first step, B itself.

    Where a step's losses differ in kind, all of them are kept: from the second meta-step on, because only the first one
    shows that they do. A checkpoint holds the batch if it is plain data, such as tensors, numbers and strings in
    tuples, lists and dicts.
    """

    keeps_previous = True

    def __init__(self) -> None:
        self._previous: list[Recording] = []
        self._whole = False  # whether to keep all losses of a step
        self._warned = False

    def keep(self, recordings: Sequence[Recording]) -> None:
        """Copy the batch, so that a caller may use its memory again."""
        self._previous = [recording.as_inputs() for recording in (recordings if self._whole else recordings[-1:])]

    def draw(self, current: Sequence[Recording], whole: bool = False) -> list[Recording]:
        """Return the kept batch, or the current one if there is none yet."""
        self._whole |= whole
        if self._previous:
            return self._previous if whole else self._previous[-1:]
        return [recording.as_inputs() for recording in (current if whole else current[-1:])]

    def state_dict(self, with_batch: bool = True) -> dict[str, Any]:
        """Return the kept batch, unless ``torch.load(weights_only=True)`` would refuse the whole checkpoint for it."""
        previous = [recording.state_dict() for recording in self._previous] if with_batch else []
        odd = odd_type(previous)
        if odd is None:
            one = previous[0] if previous else None
            return {"previous": previous if len(previous) > 1 else one, "whole": self._whole}
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the batch of the step before holds a {odd.__name__}, which is not plain data, so it is not saved: "
                "resumed right before a meta-step, that meta-step uses its own batch as B'",
                ApoWarning,
                stacklevel=2,
            )
        return {"previous": None, "whole": self._whole}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restore the kept batch."""
        saved = state.get("previous") or []
        losses = [saved] if isinstance(saved, dict) else saved
        self._previous = [Recording.from_state_dict(loss, device) for loss in losses]
        self._whole = bool(state.get("whole", False))


class SameBatch(FSDBatches):
    """B' is B (an ablation of appendix D, and the cheapest choice)."""

    is_same = True

    def draw(self, current: Sequence[Recording], whole: bool = False) -> list[Recording]:
        """Return the current batch."""
        return list(current)


class BatchStream(FSDBatches):
    """Batches from an iterable, which is started again when it ends.

    An exact resume needs to find the same position again: a source with ``state_dict`` and ``load_state_dict`` saves
    it, any other is wound forward, which gives the same batches if it yields them in the same order.

    A batch is ``(inputs, target)``, or the network's inputs alone. Inputs are passed on as :meth:`apo.APO.step` does,
    however the loop itself calls the network: a mapping as keyword arguments, a tuple or list as positional ones, and
    anything else as the only argument. For a network that takes a mapping as its one argument, yield
    ``((mapping,), target)``.

    Args:
        source: An iterable of batches, such as a ``DataLoader``.
        record: Turns a batch into a recording, given the current one as a pattern.
    """

    def __init__(self, source: Iterable[Any], record: Callable[[Any, Recording], Recording]) -> None:
        self._source = source
        self._record = record
        self._iterator: Iterator[Any] | None = None
        self._position = 0

    def draw(self, current: Sequence[Recording], whole: bool = False) -> list[Recording]:
        """Return the next batch of the stream, with one loss however many a step has.

        Raises:
            MissingBatchError: The iterable has no batch, or is an exhausted iterator.
        """
        for _ in range(2):
            if self._iterator is None:
                self._wind_to(0)
            with _own_randomness():
                batch = next(self._iterator, _END)  # type: ignore[arg-type]
            if batch is not _END:
                self._position += 1
                return [self._record(batch, current[-1])]
            self._iterator = None
        raise MissingBatchError(
            "fsd_batch yielded no batch for the function-space term: pass an iterable that can be started again "
            "(a DataLoader or a list, not a generator), fsd_batch='previous', or fsd_weight=0"
        )

    def state_dict(self, with_batch: bool = True) -> dict[str, Any]:
        """Return the position in the stream, or the source's own state where it has one."""
        if _is_stateful(self._source):
            return {"source": self._source.state_dict()}  # type: ignore[attr-defined]
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Find the position in the stream again.

        Raises:
            ValueError: The state is that of another kind of source.
        """
        if not ("position" in state or ("source" in state and _is_stateful(self._source))):
            raise ValueError(
                "the checkpoint has no position for this fsd_batch: pass the kind of fsd_batch with which it was saved"
            )
        if "source" in state:
            self._source.load_state_dict(state["source"])  # type: ignore[attr-defined]
            self._iterator = None
            return
        self._wind_to(int(state["position"]))
        if not isinstance(self._source, Sequence) and self._position:
            warnings.warn(
                f"fsd_batch was wound forward by {self._position} batches: the resume is exact only if it yields the "
                "same batches in the same order again",
                ApoWarning,
                stacklevel=2,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchStream:
        """Copy the position in the stream, not the data; a source that keeps its own position is copied."""
        if isinstance(self._source, Iterator):
            raise TypeError("fsd_batch is an iterator and cannot be copied: pass an iterable that can be started again")
        stateful = _is_stateful(self._source)
        twin = BatchStream(copy.deepcopy(self._source, memo) if stateful else self._source, self._record)
        memo[id(self)] = twin  # before the recorder is copied: it may lead back here
        twin._record = copy.deepcopy(self._record, memo)
        if not stateful:
            twin._wind_to(self._position)
        return twin

    def _wind_to(self, position: int) -> None:
        with _own_randomness():
            self._iterator, self._position = iter(self._source), position
            next(islice(self._iterator, position, position), None)


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Put the CPU's random streams back for training: a DataLoader draws its seeds and its order from them."""
    random_state = RandomState.capture(())
    try:
        yield
    finally:
        random_state.restore()


def _is_stateful(source: object) -> bool:
    return callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))


def fsd_batches(choice: object, record: Callable[[Any, Recording], Recording]) -> FSDBatches:
    """Build the source that the argument ``fsd_batch`` names.

    Args:
        choice: ``"previous"``, ``"same"`` or an iterable of batches.
        record: Turns a batch of an iterable into a recording.

    Raises:
        TypeError: It is none of these.
    """
    if choice == "previous":
        return PreviousBatch()
    if choice == "same":
        return SameBatch()
    if isinstance(choice, Iterable) and not isinstance(choice, (str, bytes, Mapping, torch.Tensor)):
        return BatchStream(choice, record)
    raise TypeError(f"fsd_batch must be 'previous', 'same' or an iterable of batches, got {choice!r}")


class OtherBatch:
    """B' of one meta-step: what stands for the losses of B on other data.

    Args:
        recordings: The losses of B.
        source: Where B' comes from; None if no term of Q needs it.
        processes: The processes that train together.
        device: Where they exchange numbers.

    Attributes:
        is_comparable: Whether it says the same kind of thing as B.
        unit: The unit of the loss, see :func:`apo.core.objective.unit_of_loss`.
    """

    def __init__(
        self, recordings: Sequence[Recording], source: FSDBatches | None, processes: Processes, device: torch.device
    ) -> None:
        sizes = sizes_of(recordings)
        # Loops that count tokens over all processes multiply each loss by their number.
        self._times = dist.get_world_size() if processes.groups else 1
        if not all(math.isclose(size, self._times, rel_tol=0.01) for size in sizes):
            self._times = 1
        terms = are_terms(recordings, sizes)
        self._drawn = [] if source is None or source.is_same else source.draw(recordings, whole=terms)
        self._sizes = sizes_of(self._drawn) if terms else []
        self._is_paired = terms and is_same_sum(sizes, self._sizes)
        if processes.groups and len(recordings) > 1:  # all run the same passes, or they wait for each other forever
            votes = processes.gather(torch.tensor([terms, not self._is_paired], dtype=torch.float32, device=device))
            some_terms, some_unpaired = votes.amax(dim=0).tolist()
            terms, self._is_paired = bool(some_terms), not some_unpaired
        self.is_comparable = self._is_paired or not terms
        self._weights = [recording.weight for recording in recordings]
        self.unit = unit_of_loss(sizes if self._is_paired else self._weights)

    def losses(self, start: PassState, share: float) -> list[Recording]:
        """Return the losses that make up that of B' together; none if it is B, or takes no part.

        Args:
            start: The state from which each of its passes starts.
            share: The share of the loss term on B'.
        """
        if self._is_paired:
            return [recording.starting_from(start, recording.weight) for recording in self._drawn]
        # B' counts as B does as a whole: once for the mean of micro-batches. The elements of a loss without reduction
        # have a weight each; their mean fits a batch of any size.
        means = (
            [weight.mean() if isinstance(weight, Tensor) else weight for weight in self._weights] if share else [1.0]
        )
        return [recording.starting_from(start, sum(means)) for recording in self._drawn[-1:]]

    def fsd_factors(self) -> list[float]:
        """Return the factor of each loss in the function-space term."""
        return [size / self._times / self.unit for size in self._sizes] if self._is_paired else [1.0]  # type: ignore[misc]


def sizes_of(recordings: Sequence[Recording]) -> list[float]:
    """Return the size of each loss's weight as a number; of a loss without reduction, the sum over its elements.

    To read weights may wait for their device, so that of a single loss is not read: it counts as 1.
    """
    if len(recordings) < 2:
        return [1.0] * len(recordings)
    sizes = [torch.as_tensor(recording.weight).detach().abs().sum() for recording in recordings]
    return torch.stack([size.to(sizes[0].device) for size in sizes]).tolist()


def are_terms(recordings: Sequence[Recording], sizes: Sequence[float]) -> bool:
    """Return whether losses with weights of these sizes are several, and no micro-batches whose mean is taken."""
    count = len(recordings)
    if count < 2:
        return False
    # The criterion called twice on one output of the network: the data are the same, so the losses are not.
    calls = {id(call.kwargs) for recording in recordings for call in recording.calls}
    shared = len(calls) < sum(len(recording.calls) for recording in recordings)
    return shared or not all(math.isclose(size, 1.0 / count, rel_tol=0.01) for size in sizes)


def is_same_sum(sizes: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether the losses of another step are as many as those of this one, with about the same total weight.

    Example:
        >>> is_same_sum([0.9, 0.1], [0.2, 0.8]), is_same_sum([1.0, 1.0], [1.0]), is_same_sum([1.0, 1.0], [1.0, 9.0])
        (True, False, False)
    """
    return len(sizes) == len(others) and max(sum(sizes), sum(others)) <= _ALIKE * min(sum(sizes), sum(others))
