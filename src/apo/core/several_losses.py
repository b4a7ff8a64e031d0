r"""Steps with several losses: what stands for their sum on another batch.

A loop may call its criterion several times before a step, and back-propagate :math:`J = \sum_i w_i L_i`. Two cases
have to be told apart:

* *Micro-batches* of one mean: every :math:`L_i` is the same function of other data, so one of them, taken alone, says
  on other data what J says.
* *Terms*: two tasks, a residual and a boundary condition, a network that is called twice. One term says little about
  the others, so B' has to be the whole sum on other data, :math:`J' = \sum_i w'_i L'_i`. The function-space term is
  then :math:`\sum_i |w'_i| \rho_i`: each loss has its own divergence, with its own weight, so that the curvature of
  each is in the unit of its loss, and a loss that is written as the sum of two halves learns the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from apo.passes.recording import Recording

__all__ = ["are_terms", "is_same_sum", "sizes_of"]

#: Largest ratio of the totals of two sums that count as the same: weights may be annealed or drawn at random.
_ALIKE = 1.5


def sizes_of(recordings: Sequence[Recording]) -> list[float]:
    """Return the size of each loss's weight as a number; of a loss without reduction, the sum over its elements.

    To read weights may wait for their device, so that of a single loss is not read: it counts as 1.
    """
    if len(recordings) < 2:
        return [1.0] * len(recordings)
    sizes = [torch.as_tensor(recording.weight).detach().abs().sum() for recording in recordings]
    return torch.stack([size.to(sizes[0].device) for size in sizes]).tolist()


def are_terms(recordings: Sequence[Recording], sizes: Sequence[float]) -> bool:
    """Return whether a step has several losses that are not micro-batches whose mean is taken.

    Args:
        recordings: The losses.
        sizes: Of their weights.
    """
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
