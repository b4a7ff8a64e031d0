"""The benchmark without tuning: what each method reaches on many tasks with one and the same setting.

``apo run no-tuning`` runs all of it, ``apo run no-tuning-digits-mlp`` one task. Every task trains on a part of its
training data, chooses rates on a part that is held out, and reports on its test data. The names say the network and,
where there are several, what differs: ``-long`` is the same task for three times as many epochs or more, ``-batch16``
has batches of 16.

:data:`CHOOSING` are the tasks on which settings of the library were chosen; on all others they are only reported.

Scales: smoke runs on generated data, in seconds; cpu takes a few thousand examples and a few hundred steps, less than
an hour for all tasks and methods with ``--jobs 2`` on two cores; paper trains whole networks on all data, on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from apo_experiments.problem import Problem
from apo_experiments.recipe import Recipe, Scale, Setting
from apo_experiments.recipes.classification import SMOKE, SMOKE_WIDTHS, TITLES
from apo_experiments.recipes.smoke import smoke_hyper
from apo_experiments.recipes.untuned import entries
from apo_experiments.tasks import held_out, language

__all__ = ["CHOOSING", "FAMILY", "RECIPES"]

#: The name of the family, and what the names of its recipes begin with.
FAMILY = "no-tuning"

#: Tasks on which settings of the library were chosen. No other may be looked at for that.
CHOOSING = tuple(
    f"{FAMILY}-{name}"
    for name in (
        "digits-mlp",
        "digits-mlp-batch8",
        "mnist-mlp",
        "mnist-autoencoder",
        "protein",
        "protein-long",
        "parkinsons",
        "cifar10-lenet",
        "cifar10-lenet-batch16",
        "gpt-characters",
        "translation",
    )
)


@dataclass(frozen=True)
class _Task:
    """A task of the benchmark.

    Attributes:
        name: Of the recipe, without the family's.
        title: For readers.
        build: Builds the problem.
        defaults: Its options, at the scale of the paper.
        data: The data sets it needs.
        goal: ``"max"`` for accuracies, ``"min"`` for losses.
        smoke: Options of the scale smoke.
        cpu: Options of the scale cpu.
        epochs: At the scales cpu and paper.
        minutes: For all methods at the scales cpu (two runs at a time) and paper (a guess).
        decay: Weight decay of the family of SGD.
        muon: Whether the network consists of matrices.
        paper: Options of the scale paper.
    """

    name: str
    title: str
    build: Callable[[Mapping[str, Any], Setting], Problem]
    defaults: Mapping[str, Any]
    data: tuple[str, ...]
    goal: str
    smoke: Mapping[str, Any]
    cpu: Mapping[str, Any]
    epochs: tuple[int, int]
    minutes: tuple[float, float]
    decay: float = 0.0
    muon: bool = True
    paper: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self) -> Recipe:
        """Return it with all methods."""
        chosen = entries(self.decay, self.muon)
        return Recipe(
            name=f"{FAMILY}-{self.name}",
            title=f"Without tuning: {self.title}",
            paper="not in the paper",
            task=self.build,
            defaults=self.defaults,
            data=self.data,
            scales={
                "smoke": Scale(2, 1, 0.2, self.smoke, smoke_hyper(chosen, keep=("interval",))),
                "cpu": Scale(self.epochs[0], 1, self.minutes[0], self.cpu),
                "paper": Scale(self.epochs[1], 1, self.minutes[1], self.paper),
            },
            entries=chosen,
            metric="test_accuracy" if self.goal == "max" else "test_loss",
            goal=self.goal,
            notes="One setting for all tasks, against rates that were tuned for this one. Not in the paper.",
        )


def _digits(variant: str, batch_size: int, epochs: tuple[int, int], minutes: tuple[float, float]) -> _Task:
    return _Task(
        name=f"digits-mlp{variant}",
        title=f"digits of 8 x 8 pixels, {_length(variant)}batches of {batch_size}",
        build=held_out.digits,
        defaults=held_out.DIGITS | {"batch_size": batch_size},
        data=(),
        goal="max",
        smoke={"data": "generated", "hidden": 16},
        cpu={},
        epochs=epochs,
        minutes=minutes,
    )


def _mnist(variant: str, batch_size: int, epochs: tuple[int, int], minutes: tuple[float, float]) -> _Task:
    options = {"dataset": "mnist", "model": "mlp", "augment": False, "batch_size": batch_size}
    return _Task(
        name=f"mnist-mlp{variant}",
        title=f"a perceptron on MNIST, {_length(variant)}batches of {batch_size}",
        build=held_out.images,
        defaults=held_out.IMAGES | options,
        data=("mnist",),
        goal="max",
        smoke=SMOKE | {"width": SMOKE_WIDTHS["mlp"]},
        cpu={"train_images": 6000, "test_images": 2000, "width": 0.1},
        epochs=epochs,
        minutes=minutes,
    )


def _table(table: str, variant: str, epochs: tuple[int, int], minutes: tuple[float, float]) -> _Task:
    return _Task(
        name=f"{table}{variant}",
        title=f"regression on UCI {table.capitalize()}" + (", long" if variant else ""),
        build=held_out.tables,
        defaults=held_out.TABLES | {"table": table},
        data=(table,),
        goal="min",
        smoke={"data": "generated", "rows": 128, "hidden": 16, "batch_size": 32},
        cpu={"rows": 9000},
        epochs=epochs,
        minutes=minutes,
    )


def _network(
    dataset: str,
    model: str,
    variant: str,
    batch_size: int,
    epochs: tuple[int, int],
    minutes: tuple[float, float],
    cpu: Mapping[str, Any],
) -> _Task:
    few: dict[str, Any] = {"train_images": 4500, "test_images": 1500, "batch_size": min(batch_size, 64)}
    if model not in ("lenet", "alexnet"):  # deep networks cost more on two cores
        few |= {"train_images": 2250, "batch_size": 32}
    return _Task(
        name=f"{dataset}-{model}{variant}",
        title=f"{TITLES[model]} on {TITLES[dataset]}, {_length(variant)}batches of {batch_size}",
        build=held_out.images,
        defaults=held_out.IMAGES | {"dataset": dataset, "model": model, "batch_size": batch_size},
        data=(dataset,),
        goal="max",
        smoke=SMOKE | {"width": SMOKE_WIDTHS.get(model, 0.06)},
        cpu={**few, **cpu},
        epochs=epochs,
        minutes=minutes,
        decay=5e-4,
        muon=False,
        paper={"precision": "bf16-autocast"},
    )


def _gpt(variant: str, epochs: tuple[int, int], minutes: tuple[float, float]) -> _Task:
    return _Task(
        name=f"gpt-characters{variant}",
        title="a small GPT on characters" + (", long" if variant else ""),
        build=language.characters,
        defaults=language.CHARACTERS,
        data=("multi30k",),
        goal="min",
        smoke={
            "data": "generated",
            "train_pairs": 60,
            "context": 8,
            "layers": 1,
            "dimension": 8,
            "heads": 1,
            "batch_size": 16,
        },
        cpu={"train_pairs": 2000, "context": 32, "layers": 2, "dimension": 64, "batch_size": 32},
        epochs=epochs,
        minutes=minutes,
    )


def _length(variant: str) -> str:
    return "long, " if variant == "-long" else ""


_TRANSLATION = _Task(
    name="translation",
    title="a Transformer on Multi30k",
    build=language.words,
    defaults=language.WORDS,
    data=("multi30k",),
    goal="min",
    smoke={
        "data": "generated",
        "train_pairs": 64,
        "vocabulary": 60,
        "layers": 1,
        "dimension": 16,
        "feed_forward": 16,
        "heads": 2,
        "max_tokens": 128,
    },
    cpu={
        "train_pairs": 3000,
        "vocabulary": 1000,
        "layers": 1,
        "dimension": 64,
        "feed_forward": 128,
        "max_tokens": 768,
    },
    epochs=(6, 15),
    minutes=(4, 20),
)

_AUTOENCODER = _Task(
    name="mnist-autoencoder",
    title="a deep autoencoder on MNIST",
    build=held_out.autoencoder,
    defaults=held_out.AUTOENCODER,
    data=("mnist",),
    goal="min",
    smoke={"data": "generated", "width": 0.05, "train_images": 128, "batch_size": 32},
    cpu={"train_images": 6000, "width": 0.1, "batch_size": 100},
    epochs=(8, 60),
    minutes=(1.6, 20),
)

_TASKS = (
    _digits("", 32, (8, 8), (1.2, 4)),
    _digits("-long", 32, (24, 24), (1.4, 8)),
    _digits("-batch8", 8, (5, 5), (1.4, 8)),
    _mnist("", 100, (6, 10), (1.4, 15)),
    _mnist("-long", 100, (20, 40), (2, 60)),
    _mnist("-batch500", 500, (30, 20), (1.4, 10)),
    _AUTOENCODER,
    _table("protein", "", (6, 20), (1.2, 10)),
    _table("protein", "-long", (20, 100), (1.4, 50)),
    _table("parkinsons", "", (10, 50), (1.2, 5)),
    _table("parkinsons", "-long", (40, 300), (1.4, 25)),
    _network("cifar10", "lenet", "", 128, (5, 20), (2, 20), {}),
    _network("cifar10", "lenet", "-long", 128, (15, 60), (4, 60), {}),
    _network("cifar10", "lenet", "-batch16", 16, (3, 10), (2.5, 60), {}),
    _network("cifar10", "alexnet", "", 128, (6, 20), (2.5, 30), {"width": 0.25}),
    _network("cifar10", "resnet32", "", 128, (3, 20), (5, 60), {"width": 0.25}),
    _network("cifar10", "wrn-16-4", "", 128, (3, 20), (4, 60), {"width": 0.125}),
    _network("cifar100", "resnet32", "", 128, (3, 20), (5, 60), {"width": 0.25}),
    _gpt("", (2, 10), (2.5, 20)),
    _gpt("-long", (6, 30), (6, 60)),
    _TRANSLATION,
)

RECIPES = {recipe.name: recipe for recipe in (task.recipe() for task in _TASKS)}
