"""The paper's ablations (appendices D and I).

- ``ablation-loss-batch``: the loss term on the batch of the step or on another one. The claim: on another batch the
  learned rate collapses and training stops (short-horizon bias).
- ``ablation-fsd-batch``: the FSD term on another batch (unbiased) or on that of the step (cheaper).
- ``ablation-lambdas``: AlexNet with APO-Precond is robust over ranges of both weights.
- ``ablation-initial-rate``: rates that start six orders of magnitude apart become the same, and so do the losses. With
  the library's warm start, which measures its own first rate, that is true by construction: seven bit-identical runs.
  The entries ``paper-lr=...`` have the paper's settings and no warm start, so that the claim can fail.
- ``ablation-interval-rate``, ``ablation-interval-precond``: meta-steps every 10 to 100 steps perform equally well.

The paper trains ResNet-32 (rates; 400 epochs) and AlexNet (preconditioner; 200 epochs) on CIFAR-10.

Scales: smoke runs on generated images, in seconds; cpu trains LeNet instead of ResNet-32 and a narrow AlexNet on a few
thousand images, in minutes; paper is the paper's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from apo_experiments.recipe import Entry, Recipe, Scale, by_name
from apo_experiments.recipes.classification import CPU, image_recipe
from apo_experiments.recipes.classification import RECIPES as CLASSIFICATION

_RATE = {"weight_decay": 5e-4, "fsd_weight": 0.3}
_PRECOND = {entry.label: dict(entry.hyper) for entry in CLASSIFICATION["cifar10-alexnet"].entries}["APO-Precond"]


def _recipe(name: str, entries: Iterable[Entry], preconditioned: bool = False, **about: Any) -> Recipe:
    entries, model = tuple(entries), "alexnet" if preconditioned else "resnet32"
    if preconditioned:
        few = replace(CPU["alexnet"], hyper={entry.label: {"meta_lr": 1e-3} for entry in entries})
    else:
        few = replace(CPU["lenet"], options={**CPU["lenet"].options, "model": "lenet"}, hyper={})
    whole = Scale(200, 1, 40 * len(entries)) if preconditioned else Scale(400, 1, 90 * len(entries))
    about = {"metric": "test_accuracy" if preconditioned else "train_loss", "figure": "ablation"} | about
    return image_recipe({"dataset": "cifar10", "model": model}, entries, few, whole, name=f"ablation-{name}", **about)


_WEIGHTS = (
    *(("wsd", "wsd_weight", weight) for weight in (3.0, 1.0, 0.3, 0.1, 0.03)),
    *(("fsd", "fsd_weight", weight) for weight in (1.0, 0.3, 0.03, 0.01)),
)
_INTERVALS: dict[str, Any] = {
    "paper": "Appendix I.2",
    "notes": "Meta-steps every 10 to 100 steps perform alike, at 1.3 to 1.03 times the cost of the base optimizer.",
    "keep": ("interval", "warmup_interval"),
}

RECIPES = by_name(
    _recipe(
        "loss-batch",
        (
            Entry(f"{name}-{batch}", f"{base}-apo", _RATE | {"other_batch_share": float(batch == "other")})
            for name, base in (("SGDm", "sgdm"), ("RMSprop", "rmsprop"))
            for batch in ("same", "other")
        ),
        title="The loss term on the same batch or another",
        paper="Appendix D",
        notes="On another batch the rate collapses.",
    ),
    _recipe(
        "fsd-batch",
        (Entry(f"Adam-{batch}", "adam-apo", _RATE | {"fsd_batch": batch}) for batch in ("previous", "same")),
        title="The FSD term on another batch or the same",
        paper="Appendix D",
        notes="The same batch is cheaper, but a biased estimate of how predictions change elsewhere.",
    ),
    _recipe(
        "lambdas",
        (Entry(f"{short}={weight:g}", "apo-precond", _PRECOND | {key: weight}) for short, key, weight in _WEIGHTS),
        preconditioned=True,
        title="Weights of FSD and WSD for a learned preconditioner",
        paper="Appendix I.1",
        notes="The test accuracy is robust over a range of both weights; "
        "wsd=0.3 is the setting that both series share.",
    ),
    _recipe(
        "initial-rate",
        (
            Entry(f"{prefix}lr={10.0**power:g}", "sgdm-apo", _RATE | preset | {"lr": 10.0**power})
            for prefix, preset in (("paper-", {"preset": "paper"}), ("", {}))
            for power in range(-6, 1)
        ),
        title="Initial rates over six orders of magnitude",
        paper="Appendix I.2",
        notes="Schedules and losses are almost identical from initial rates over six orders of magnitude. The entries "
        "paper-lr=... put it to the test; ours start from a rate that they measure, so that they are identical.",
    ),
    _recipe(
        "interval-rate",
        (Entry(f"K={interval}", "sgdm-apo", _RATE | {"interval": interval}) for interval in (10, 20, 50, 100)),
        title="Interval between meta-steps, rate",
        **_INTERVALS,
    ),
    _recipe(
        "interval-precond",
        (
            Entry(f"K={interval}", "apo-precond", _PRECOND | {"warmup_interval": None, "interval": interval})
            for interval in (10, 20, 50, 100)
        ),
        preconditioned=True,
        title="Interval between meta-steps, preconditioner",
        **_INTERVALS,
    ),
)
