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

from apo_experiments.recipe import Entry, Recipe, Scale, by_name
from apo_experiments.recipes.classification import CPU, image_recipe
from apo_experiments.recipes.classification import RECIPES as CLASSIFICATION

_RATE = {"weight_decay": 5e-4, "fsd_weight": 0.3}
_PRECOND = {entry.label: dict(entry.hyper) for entry in CLASSIFICATION["cifar10-alexnet"].entries}["APO-Precond"]


def _recipe(
    name: str,
    title: str,
    paper: str,
    claim: str,
    entries: Iterable[Entry],
    *,
    preconditioned: bool = False,
    metric: str = "train_loss",
    varied: Iterable[str] = (),
) -> Recipe:
    entries, model = tuple(entries), "alexnet" if preconditioned else "resnet32"
    cpu, epochs, minutes = CPU["alexnet" if preconditioned else "lenet"]
    few = Scale(epochs, 1, minutes, cpu if preconditioned else cpu | {"model": "lenet"})
    if preconditioned:
        few = replace(few, hyper={entry.label: {"meta_lr": 1e-3} for entry in entries})
    whole = Scale(200, 1, 40 * len(entries)) if preconditioned else Scale(400, 1, 90 * len(entries))
    options = {"dataset": "cifar10", "model": model}
    return image_recipe(
        f"ablation-{name}", title, paper, options, entries, few, whole, claim, metric, varied, figure="ablation"
    )


_WEIGHTS = (
    *(("wsd", "wsd_weight", weight) for weight in (3.0, 1.0, 0.3, 0.1, 0.03)),
    *(("fsd", "fsd_weight", weight) for weight in (1.0, 0.3, 0.03, 0.01)),
)
_INTERVALS = (10, 20, 50, 100)
_INTERVAL_CLAIM = "Meta-steps every 10 to 100 steps perform alike, at 1.3 to 1.03 times the cost of the base optimizer."

_RECIPES = (
    _recipe(
        "loss-batch",
        "The loss term on the same batch or another",
        "Appendix D",
        "On another batch the rate collapses.",
        (
            Entry(f"{name}-{batch}", f"{base}-apo", _RATE | {"other_batch_share": float(batch == "other")})
            for name, base in (("SGDm", "sgdm"), ("RMSprop", "rmsprop"))
            for batch in ("same", "other")
        ),
    ),
    _recipe(
        "fsd-batch",
        "The FSD term on another batch or the same",
        "Appendix D",
        "The same batch is cheaper, but a biased estimate of how predictions change elsewhere.",
        (Entry(f"Adam-{batch}", "adam-apo", _RATE | {"fsd_batch": batch}) for batch in ("previous", "same")),
    ),
    _recipe(
        "lambdas",
        "Weights of FSD and WSD for a learned preconditioner",
        "Appendix I.1",
        "The test accuracy is robust over a range of both weights; wsd=0.3 is the setting that both series share.",
        (Entry(f"{short}={weight:g}", "apo-precond", _PRECOND | {key: weight}) for short, key, weight in _WEIGHTS),
        preconditioned=True,
        metric="test_accuracy",
    ),
    _recipe(
        "initial-rate",
        "Initial rates over six orders of magnitude",
        "Appendix I.2",
        "Schedules and losses are almost identical from initial rates over six orders of magnitude. The entries "
        "paper-lr=... put it to the test; ours start from a rate that they measure, so that they are identical.",
        (
            Entry(f"{prefix}lr={10.0**power:g}", "sgdm-apo", _RATE | preset | {"lr": 10.0**power})
            for prefix, preset in (("paper-", {"preset": "paper"}), ("", {}))
            for power in range(-6, 1)
        ),
    ),
    _recipe(
        "interval-rate",
        "Interval between meta-steps, rate",
        "Appendix I.2",
        _INTERVAL_CLAIM,
        (Entry(f"K={interval}", "sgdm-apo", _RATE | {"interval": interval}) for interval in _INTERVALS),
        varied=("interval", "warmup_interval"),
    ),
    _recipe(
        "interval-precond",
        "Interval between meta-steps, preconditioner",
        "Appendix I.2",
        _INTERVAL_CLAIM,
        (
            Entry(f"K={interval}", "apo-precond", _PRECOND | {"warmup_interval": None, "interval": interval})
            for interval in _INTERVALS
        ),
        preconditioned=True,
        metric="test_accuracy",
        varied=("interval", "warmup_interval"),
    ),
)

RECIPES = by_name(*_RECIPES)
