"""Figure 1: exact proximal updates on 1-D regression.

The paper's claim: with the weight-space term alone (WSD), fitting one new example changes the function everywhere; with
the function-space term alone (FSD), the update carves a spike around the example; with both, it changes the function
locally and improves neighbours, too.

Scales: nothing is trained, so that all three are the same but for the size of the network. Seconds each.
"""

from __future__ import annotations

from apo_experiments.recipe import Entry, Recipe, Scale, by_name
from apo_experiments.tasks.figure1 import DEFAULTS, figure1

_ENTRIES = tuple(
    Entry(f"{name}-{weight:g}", "exact", {"fsd_weight": fsd * weight, "wsd_weight": wsd * weight})
    for name, fsd, wsd in (("WSD", 0.0, 1.0), ("FSD", 1.0, 0.0), ("both", 1.0, 1.0))
    for weight in (10.0, 1.0, 0.1)
)

RECIPES = by_name(
    Recipe(
        name="figure-1",
        title="What each discrepancy does to one exact proximal update",
        paper="Figure 1",
        task=None,
        compute=figure1,
        defaults=DEFAULTS,
        data=(),
        scales={
            "smoke": Scale(1, 1, 0.1, {"hidden": 16, "data_points": 12, "tolerance": 1e-4}),
            "cpu": Scale(1, 1, 0.5),
            "paper": Scale(1, 1, 0.5),
        },
        entries=_ENTRIES,
        metric="example_loss",
        goal="min",
        figure="figure-1",
        notes="WSD alone changes predictions everywhere, FSD alone carves a spike, both together change them locally; "
        "change_near and change_far measure it.",
    )
)
