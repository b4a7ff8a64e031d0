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
from typing import Any

from apo_experiments.recipe import Entry, Recipe, Scale
from apo_experiments.recipes.classification import CPU, SMOKE, SMOKE_WIDTHS
from apo_experiments.recipes.classification import entries as preconditioned
from apo_experiments.recipes.smoke import smoke_hyper
from apo_experiments.tasks.images import DEFAULTS, images

_RATE = {"weight_decay": 5e-4, "fsd_weight": 0.3}
_PRECOND = dict(preconditioned("alexnet")[-1].hyper)


def _recipe(
    name: str,
    title: str,
    paper: str,
    model: str,
    entries: tuple[Entry, ...],
    notes: str,
    metric: str,
    varied: Iterable[str],
) -> Recipe:
    rate = model == "resnet32"
    cpu, epochs, minutes = CPU["lenet" if rate else model]
    cpu = cpu | {"model": "lenet"} if rate else cpu
    short: dict[str, dict[str, Any]] = {} if rate else {entry.label: {"meta_lr": 1e-3} for entry in entries}
    return Recipe(
        name=f"ablation-{name}",
        title=title,
        paper=paper,
        task=images,
        defaults=DEFAULTS | {"dataset": "cifar10", "model": model},
        data=("cifar10",),
        scales={
            "smoke": Scale(2, 1, 0.1, SMOKE | {"width": SMOKE_WIDTHS[model]}, smoke_hyper(entries, keep=varied)),
            "cpu": Scale(epochs, 1, minutes, cpu, short),
            "paper": Scale(400 if rate else 200, 1, 90 * len(entries) if rate else 40 * len(entries)),
        },
        entries=entries,
        metric=metric,
        goal="max" if metric == "test_accuracy" else "min",
        figure="ablation",
        notes=notes,
    )


def _loss_batch() -> Recipe:
    entries = tuple(
        Entry(f"{name}-{batch}", f"{base}-apo", _RATE | {"other_batch_share": float(batch == "other")})
        for name, base in (("SGDm", "sgdm"), ("RMSprop", "rmsprop"))
        for batch in ("same", "other")
    )
    title, claim = "The loss term on the same batch or another", "On another batch the rate collapses."
    return _recipe("loss-batch", title, "Appendix D", "resnet32", entries, claim, "train_loss", ())


def _fsd_batch() -> Recipe:
    entries = tuple(Entry(f"Adam-{batch}", "adam-apo", _RATE | {"fsd_batch": batch}) for batch in ("previous", "same"))
    title = "The FSD term on another batch or the same"
    claim = "The same batch is cheaper, but a biased estimate of how predictions change elsewhere."
    return _recipe("fsd-batch", title, "Appendix D", "resnet32", entries, claim, "train_loss", ())


def _lambdas() -> Recipe:
    wsd = [("wsd", "wsd_weight", weight) for weight in (3.0, 1.0, 0.3, 0.1, 0.03)]
    fsd = [("fsd", "fsd_weight", weight) for weight in (1.0, 0.3, 0.03, 0.01)]
    entries = tuple(
        Entry(f"{short}={weight:g}", "apo-precond", _PRECOND | {key: weight}) for short, key, weight in (*wsd, *fsd)
    )
    title = "Weights of FSD and WSD for a learned preconditioner"
    claim = "The test accuracy is robust over a range of both weights; wsd=0.3 is the setting that both series share."
    return _recipe("lambdas", title, "Appendix I.1", "alexnet", entries, claim, "test_accuracy", ())


def _initial_rate() -> Recipe:
    entries = tuple(
        Entry(f"{prefix}lr={10.0**power:g}", "sgdm-apo", _RATE | preset | {"lr": 10.0**power})
        for prefix, preset in (("paper-", {"preset": "paper"}), ("", {}))
        for power in range(-6, 1)
    )
    title = "Initial rates over six orders of magnitude"
    claim = (
        "Schedules and losses are almost identical from initial rates over six orders of magnitude. The entries "
        "paper-lr=... put it to the test; ours start from a rate that they measure, so that they are identical."
    )
    return _recipe("initial-rate", title, "Appendix I.2", "resnet32", entries, claim, "train_loss", ())


def _interval(name: str, title: str, model: str, method: str, hyper: dict[str, Any], metric: str) -> Recipe:
    entries = tuple(Entry(f"K={interval}", method, hyper | {"interval": interval}) for interval in (10, 20, 50, 100))
    claim = "Meta-steps every 10 to 100 steps perform alike, at 1.3 to 1.03 times the cost of the base optimizer."
    return _recipe(name, title, "Appendix I.2", model, entries, claim, metric, ("interval", "warmup_interval"))


RECIPES = {
    recipe.name: recipe
    for recipe in (
        _loss_batch(),
        _fsd_batch(),
        _lambdas(),
        _initial_rate(),
        _interval("interval-rate", "Interval between meta-steps, rate", "resnet32", "sgdm-apo", _RATE, "train_loss"),
        _interval(
            "interval-precond",
            "Interval between meta-steps, preconditioner",
            "alexnet",
            "apo-precond",
            _PRECOND | {"warmup_interval": None},
            "test_accuracy",
        ),
    )
}
