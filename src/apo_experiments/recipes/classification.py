"""Image classification with a learned preconditioner (Table 2).

The paper's claim: APO-Precond generalises at least as well as SGDm, Adam and KFAC, and much better for networks without
BatchNorm. Batches of 128, 200 epochs, the rate of every method divided by 5 after 30, 60 and 80 per cent of the run,
three seeds; crops, flips and normalisation as usual (SVHN without crops and flips, which change what a digit is).

Here the preconditioner learns at every step of its warm-up, with a meta-rate of 3e-4 (1e-3 in short runs) and a guard
that hands over only once the look-ahead helps: with the paper's 1e-4 and a hand-over by step count alone, 22 of 24
points of LeNet's grid diverged. Networks with BatchNorm get a larger FSD and a smaller WSD weight, as in the paper.
Rates, damping and weight decay are starting points from the grids: `--best` takes what sweeps have found. (KFAC at 0.01
diverges on LeNet within a few steps, so it starts at 0.003.) APO-Eigen, which is not in the paper, has the library's
defaults on all networks, and no schedule: it is told how long the run is.

Scales: smoke runs on generated images with narrow networks, in seconds; cpu takes a few thousand real images and a
narrower network (LeNet's is whole) for a few epochs, in minutes, which says little about the final accuracy; paper is
the paper's own, hours on one GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from apo_experiments.recipe import Entry, Recipe, Scale, by_name
from apo_experiments.recipes import grids
from apo_experiments.tasks.images import DEFAULTS, images

#: How papers write the names.
TITLES = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "svhn": "SVHN",
    "lenet": "LeNet",
    "alexnet": "AlexNet",
    "vgg16": "VGG-16",
    "resnet18": "ResNet-18",
    "resnet32": "ResNet-32",
    "resnet34": "ResNet-34",
    "wrn-28-10": "WRN-28-10",
    "wrn-16-4": "WRN-16-4",
    "wrn-16-8": "WRN-16-8",
}

#: Table 2: SGDm, Adam, KFAC, APO-Precond.
_PAPER = {
    ("cifar10", "lenet"): (75.73, 73.41, 76.63, 77.42),
    ("cifar10", "alexnet"): (76.27, 76.09, 78.33, 81.14),
    ("cifar10", "vgg16"): (91.82, 90.19, 92.05, 92.13),
    ("cifar10", "resnet18"): (93.69, 93.27, 94.60, 94.75),
    ("cifar10", "resnet32"): (94.40, 93.30, 94.49, 94.83),
    ("cifar100", "alexnet"): (43.95, 41.82, 46.24, 52.35),
    ("cifar100", "vgg16"): (65.98, 60.61, 61.84, 67.95),
    ("cifar100", "resnet18"): (76.85, 70.87, 76.48, 76.88),
    ("cifar100", "resnet32"): (77.47, 68.67, 75.70, 77.41),
    ("svhn", "resnet18"): (96.19, 95.59, 96.08, 96.89),
}

#: Rates of SGDm, which differ between networks with and without BatchNorm.
_NORMALISED = ("resnet18", "resnet32")

#: Options of the task for seconds.
SMOKE: dict[str, Any] = {"data": "generated", "train_images": 48, "test_images": 24, "batch_size": 16}
#: How narrow each network is then.
SMOKE_WIDTHS = {
    "mlp": 0.03,
    "lenet": 0.5,
    "alexnet": 0.06,
    "vgg16": 0.06,
    "resnet18": 0.06,
    "resnet32": 0.25,
    "resnet34": 0.06,
    "wrn-28-10": 0.025,
    "wrn-16-8": 0.03,
}
#: What learns in so few steps; on LeNet's first plateau a preconditioner diverges unless its updates are clipped.
_SHORT = {"APO-Precond": {"meta_lr": 1e-3}}
_CLIPPED = {"APO-Precond": {"meta_lr": 1e-3, "clip": 0.1}}
#: Sizes for two cores.
CPU: dict[str, Scale] = {
    "lenet": Scale(10, 1, 4, {"train_images": 10000, "test_images": 2000}, _CLIPPED),
    "alexnet": Scale(8, 1, 8, {"train_images": 5000, "test_images": 1000, "width": 0.5}, _SHORT),
    "vgg16": Scale(5, 1, 8, {"train_images": 3000, "test_images": 1000, "width": 0.25}, _SHORT),
    "resnet18": Scale(4, 1, 10, {"train_images": 3000, "test_images": 1000, "width": 0.25}, _SHORT),
    "resnet32": Scale(4, 1, 8, {"train_images": 3000, "test_images": 1000, "width": 0.5}, _SHORT),
}
#: Minutes for all methods and seeds of the whole experiment on a data-centre GPU.
_PAPER_MINUTES = {"lenet": 60, "alexnet": 150, "vgg16": 400, "resnet18": 900, "resnet32": 500}


def entries(model: str, paper: tuple[float, ...] | None = None) -> tuple[Entry, ...]:
    """Return the methods for a network, with the paper's accuracies if it has any."""
    normalised = model in _NORMALISED
    shared = {"weight_decay": 5e-4, "schedule": "step"}
    discrepancies = {"fsd_weight": 1.0, "wsd_weight": 0.1} if normalised else {"fsd_weight": 0.1, "wsd_weight": 0.3}
    apo = {"lr": 1.0, "meta_lr": 3e-4, "warmup_lr": 0.01, "warmup_interval": 1, "matmul": "tf32", **discrepancies}
    methods = (
        ("SGDm", "sgdm", {"lr": 0.1 if normalised else 0.03}, grids.SGDM_CIFAR),
        ("Adam", "adam", {"lr": 1e-3}, grids.ADAM_CIFAR),
        ("KFAC", "kfac", {"lr": 3e-3, "damping": 1e-2}, grids.KFAC_CIFAR),
        ("APO-Precond", "apo-precond", apo, grids.APO_NORMALISED if normalised else grids.APO_PLAIN),
    )
    return (
        *(
            Entry(label, method, shared | own, grid | grids.DECAY_PRECOND, paper=value)
            for (label, method, own, grid), value in zip(methods, paper or [None] * 4, strict=True)
        ),
        # The library's defaults: no rate and no schedule.
        Entry("APO-Eigen", "apo-eigen", {"weight_decay": 5e-4}, grids.DECAY_PRECOND),
    )


def image_recipe(
    options: dict[str, Any],
    entries: tuple[Entry, ...],
    cpu: Scale,
    full: Scale,
    metric: str = "test_accuracy",
    keep: Iterable[str] = (),
    **about: Any,
) -> Recipe:
    """Return a recipe that classifies images.

    Args:
        options: Options of the task, ``dataset`` and ``model`` among them.
        entries: Its methods.
        cpu: Its size for two cores.
        full: The paper's.
        metric: What the table shows.
        keep: Hyperparameters that are the same in smoke runs.
        about: Other attributes of the recipe.
    """
    smoke = SMOKE | {"width": SMOKE_WIDTHS[options["model"]]}
    return Recipe(
        task=images,
        defaults=DEFAULTS | options,
        data=(options["dataset"],),
        scales={
            "smoke": Scale(2, 1, 0.02 * len(entries), smoke, grids.smoke_hyper(entries, keep)),
            "cpu": cpu,
            "paper": full,
        },
        entries=entries,
        metric=metric,
        goal="max" if metric == "test_accuracy" else "min",
        **about,
    )


def _recipe(dataset: str, model: str) -> Recipe:
    return image_recipe(
        {"dataset": dataset, "model": model, "augment": dataset != "svhn"},
        entries(model, _PAPER[dataset, model]),
        CPU[model],
        Scale(200, 3, _PAPER_MINUTES[model]),
        name=f"{dataset}-{model}",
        title=f"{TITLES[model]} on {TITLES[dataset]} with a learned preconditioner",
        paper="Table 2",
        notes="APO-Precond generalises at least as well as the others, much better without BatchNorm.",
    )


RECIPES = by_name(*(_recipe(dataset, model) for dataset, model in _PAPER))
