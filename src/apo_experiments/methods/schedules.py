r"""Learning-rate schedules as factors on the initial rate.

================  ====================================================================================
fixed             1
step              :math:`decay^{\#\{m : t \ge m T\}}` for the milestones m, fractions of the run T
inverse-sqrt      linear rise over w steps, then :math:`\sqrt{w / t}` (w = 4,000 in the paper)
cosine            linear rise over w steps, then half a cosine down to 0 at the end of the run
warm-cosine       the same with w = 5% of the run
================  ====================================================================================

They are torch schedulers, so that with APO their factor multiplies the learned rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from apo_experiments.errors import UserError, choose
from apo_experiments.problem import Budget

#: Names of the schedules.
SCHEDULES = ("fixed", "step", "inverse-sqrt", "cosine", "warm-cosine")

#: Share of the run over which warm-cosine, and others that do without tuning, rise.
WARM_UP = 0.05


def schedule_factor(hyper: Mapping[str, Any], budget: Budget) -> Callable[[int], float]:
    """Return the factor on the rate as a function of the step.

    Args:
        hyper: With ``schedule``, ``decay``, ``milestones`` and ``schedule_warmup``.
        budget: How long the run is.

    Raises:
        UserError: The schedule is unknown, or a milestone is no fraction.

    Example:
        >>> hyper = {"schedule": "step", "decay": 0.2, "milestones": (0.5,), "schedule_warmup": 0}
        >>> factor = schedule_factor(hyper, Budget(steps=10, steps_per_epoch=1))
        >>> [factor(step) for step in (0, 4, 5, 9)]
        [1.0, 1.0, 0.2, 0.2]
    """
    name = choose("schedule", hyper["schedule"], SCHEDULES)
    total = max(1, budget.steps)
    rise = round(WARM_UP * total) if name == "warm-cosine" else int(hyper["schedule_warmup"])
    decay, milestones = float(hyper["decay"]), tuple(hyper["milestones"])
    if not all(0 <= milestone <= 1 for milestone in milestones):
        raise UserError(
            f"milestones was {','.join(map(str, milestones))}: they are fractions of the run, "
            "so give numbers from 0 to 1 such as 0.3,0.6,0.8."
        )

    def factor(step: int) -> float:
        if name == "fixed":
            return 1.0
        if name == "step":
            return decay ** sum(step >= round(milestone * total) for milestone in milestones)
        if step < rise:
            return (step + 1) / rise
        if name == "inverse-sqrt":
            return math.sqrt(max(1, rise) / max(1, step + 1))
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rise) / max(1, total - rise))))

    return factor


def build_scheduler(optimizer: Optimizer, hyper: Mapping[str, Any], budget: Budget) -> LambdaLR | None:
    """Return the scheduler, or None for a fixed rate.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> build_scheduler(
        ...     optimizer, {"schedule": "fixed", "decay": 1, "milestones": (), "schedule_warmup": 0}, Budget(10, 1)
        ... ) is None
        True
    """
    factor = schedule_factor(hyper, budget)
    return None if hyper["schedule"] == "fixed" else LambdaLR(optimizer, factor)
