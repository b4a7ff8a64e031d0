"""Regression on three tables of the UCI collection (Figure 3).

The paper's claim: APO-Precond converges as fast as other second-order methods and reaches a lower training loss than
SGDm, Adam, Shampoo and KFAC on Slice, Protein and Parkinsons. Two hidden layers of 100 ReLU units, batches of 128, 500
epochs, no weight decay, three seeds; FSD weight 0.

Here the preconditioner starts at 0.3 or 1 times the identity, with a meta-rate of 1e-3 instead of the paper's 1e-4, a
meta-step at every step and no warm-up; on Parkinsons with momentum 0.9 at a scale of 0.1, on Protein without momentum
and with updates clipped to a norm of 0.1.

What was found does not show the claim; the results page has the figures. Every method had the paper's grid (SGDm 9
points, Adam 5, Shampoo 9, KFAC 36), APO-Precond 16 points on Protein and 32 on Parkinsons (the paper's four WSD
weights, times start, meta-rate and, on Parkinsons, warm-up), judged on seed 0 after 50 epochs; the best point on
Protein and the best two on Parkinsons then ran for 500 epochs, and the better mean counts. The axes of APO-Precond's
grid come from about 30 shorter trials. Many points diverge: 13 of 16 of APO-Precond's on Protein, and KFAC's best two
on Parkinsons on one and two of three seeds. Clipping came last: of the grid, without it, Protein ended at 0.279, and 14
more trials of 20 epochs led to the setting here. Slice could not be run: its settings are guesses. APO-Eigen, which is
not in the paper, has the library's defaults but for the FSD weight.

Scales: smoke runs on generated rows in seconds; cpu trains for fewer epochs, in minutes; paper is the paper's own.
"""

from __future__ import annotations

from apo_experiments.recipe import Recipe, Scale, by_name
from apo_experiments.recipes import grids
from apo_experiments.tasks.uci import DEFAULTS, uci

#: Learning rates of SGDm, Adam and Shampoo, learning rate and damping of KFAC, initial matrix of APO-Precond.
_CHOSEN = {
    "slice": ((0.03, 1e-3, 0.03), (0.003, 3e-2), 0.3),
    "protein": ((0.03, 3e-3, 0.03), (0.003, 3e-2), 0.3),
    "parkinsons": ((0.1, 3e-3, 0.03), (0.01, 1e-2), 1.0),
}


#: KFAC explodes within a few steps at some point of a run on Parkinsons, at smaller rates and larger damping too, and
#: rounding decides when. Of 60 epochs, seeds that diverged at (rate, damping): (0.01, 0.01) 0 of 10 with one thread and
#: 2 of 6 with two, (0.003, 0.01) 3 of 10, (0.01, 0.03) 3 of 10. With a bound on the length of a step in the Fisher
#: metric, which the paper does not mention: none of 20, 6, 10 and 10, at the same losses.
_CPU_HYPER = {"parkinsons": {"KFAC": {"kl_clip": 0.01}}}

#: Options of the task for seconds.
SMOKE = {"data": "generated", "rows": 128, "hidden": 16, "batch_size": 32}


def _recipe(table: str, title: str, epochs: int, minutes: tuple[float, float]) -> Recipe:
    rates, kfac, start = _CHOSEN[table]
    step = {"scale": 0.1, "momentum": 0.9} if table == "parkinsons" else {"scale": 0.9, "momentum": 0.0, "clip": 0.1}
    rule = {"interval": 1, "fsd_weight": 0.0, "wsd_weight": 0.1, "meta_lr": 1e-3}
    warmup = {"warmup": "none", "warmup_lr": 0.01, "warmup_interval": 1}
    entries = grids.entries(rates, kfac, {"lr": start, **step, **rule, **warmup}, {"fsd_weight": 0.0})
    return Recipe(
        name=f"uci-{table}",
        title=f"Regression on {title}",
        paper="Figure 3",
        task=uci,
        defaults=DEFAULTS | {"table": table},
        data=(table,),
        scales={
            "smoke": Scale(2, 1, 0.05, SMOKE, grids.smoke_hyper(entries)),
            "cpu": Scale(epochs, 1, minutes[0], hyper=_CPU_HYPER.get(table, {})),
            "paper": Scale(500, 3, minutes[1]),
        },
        entries=entries,
        metric="objective",
        goal="min",
        notes="APO-Precond reaches the lowest training loss (mean squared error of normalised targets).",
    )


RECIPES = by_name(
    _recipe("slice", "CT slices: 53,500 rows, 384 inputs", 10, (5, 300)),
    _recipe("protein", "proteins: 45,730 rows, 9 inputs", 10, (4, 240)),
    _recipe("parkinsons", "voices: 5,875 rows, 19 inputs, two targets", 60, (3, 40)),
)
