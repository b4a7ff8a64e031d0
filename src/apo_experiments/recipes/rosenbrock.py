"""Rosenbrock: a learned rate and a learned full matrix against SGD at its best fixed rate (appendix C.1).

The paper's claim: from (1, -1.5) both outperform the best fixed rate, and the matrix, which can follow the valley,
does so dramatically.

What was found, after 2,000 steps in float64 with one meta-step a step: SGD at 0.0022, the best of 23 fixed rates,
1.4e-3 (0.0024 diverges); APO on the rate 3e-4; APO on the full matrix below 1e-29. The matrix is robust with RMSprop
(meta-rates 0.01 to 0.1) if it starts at 1e-3; from 3e-3, 32 of 40 settings diverged. The rate is not robust: of 306
settings 129 diverged, the library's defaults among them, and some 45 ended below SGD. They cluster at meta-rates of 0.4
to 1 with beta2 = 0.9 and WSD weights of 3 to 100; those here are from their middle. A greedy rate falls where the
gradient turns across the valley and rises where it points along it, so that the meta-optimizer has to be fast.

Scales: smoke 100 steps, cpu and paper 2,000 steps; seconds.
"""

from __future__ import annotations

from apo_experiments.recipe import Entry, Recipe, Scale, by_name
from apo_experiments.tasks.rosenbrock import DEFAULTS, rosenbrock

_FAST = {"lr": 1e-3, "interval": 1, "fsd_weight": 0.0, "meta_beta2": 0.9}
_RATE = {"wsd_weight": 30.0, "warm_start": False, "max_change": 0.0, "meta_lr": 0.8}
_MATRIX = {"wsd_weight": 1e-3, "meta_optimizer": "rmsprop", "meta_lr": 0.03}
_FIXED_RATES = (0.0005, 0.001, 0.0014, 0.0018, 0.002, 0.0021, 0.0022, 0.0023, 0.0024)
_RATE_GRID = {"meta_lr": (0.1, 0.2, 0.4, 0.6, 0.8, 1.0), "wsd_weight": (10.0, 30.0, 100.0)}
_MATRIX_GRID = {"meta_lr": (0.003, 0.01, 0.03, 0.1), "wsd_weight": (0.0, 1e-3, 1e-2)}
_ENTRIES = (
    Entry("SGD", "sgd", {"lr": 0.0022}, {"lr": _FIXED_RATES}),
    Entry("SGD-APO", "sgd-apo", _FAST | _RATE, _RATE_GRID),
    Entry("APO-Precond", "apo-precond-full", _FAST | _MATRIX, _MATRIX_GRID),
)

RECIPES = by_name(
    Recipe(
        name="rosenbrock",
        title="A learned rate and a learned matrix on the Rosenbrock function",
        paper="Figure 7 (appendix C.1)",
        task=rosenbrock,
        defaults=DEFAULTS,
        data=(),
        scales={"smoke": Scale(10, 1, 0.02), "cpu": Scale(200, 1, 0.3), "paper": Scale(200, 1, 0.3)},
        entries=_ENTRIES,
        metric="objective",
        goal="min",
        figure="rosenbrock",
        notes="Both learned updates beat SGD at its best fixed rate, the matrix dramatically. An epoch is ten steps.",
    )
)
