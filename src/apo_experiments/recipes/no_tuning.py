"""The benchmark without tuning: what each method reaches on many tasks with one and the same setting.

``apo run no-tuning`` runs all of it, ``apo run no-tuning-digits-mlp`` one task. Every task trains on a part of its
training data, chooses rates on a part that is held out, and reports on its test data. The names say the network and,
where there are several, what differs: ``-long`` is the same task for three times as many epochs or more, ``-batch16``
has batches of 16. The methods are one list for all tasks:

- APO around SGDm and AdamW, and around Muon where a network consists of matrices, as the library has it, and with the
  paper's settings (``-paper``); and the second-order method whose rates and dampings it learns (APO-Eigen).
- SGDm, AdamW and NadamW under a cosine with 5% of warm-up at seven rates each. One rate is the usual default; the rate
  that is best on a task's held-out data is the *tuned* one; NadamW's rate that is best over all tasks together is the
  *calibrated* one. :mod:`apo_experiments.no_tuning.scores` finds both in the records.
- Methods of others that promise to do without a rate, with the defaults and the schedule that their authors document.

:data:`CHOOSING` are the tasks on which settings of the library were chosen; on all others they are only reported.

Scales: smoke runs on generated data, in seconds; cpu takes a few thousand examples and a few hundred steps, one to two
hours for all tasks and methods with ``--jobs 2`` on two cores; paper trains whole networks on all data, on one GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apo_experiments.recipe import NOT_IN_PAPER, Entry, Recipe, Scale, by_name
from apo_experiments.recipes import autoencoder, translation, uci
from apo_experiments.recipes.classification import SMOKE, SMOKE_WIDTHS, TITLES
from apo_experiments.recipes.grids import smoke_hyper
from apo_experiments.tasks import held_out, language

#: The name of the family, and what the names of its recipes begin with.
FAMILY = "no-tuning"

#: Tasks on which settings of the library were chosen. No other may be looked at for that.
CHOOSING = tuple(
    f"{FAMILY}-{name}"
    for name in (
        *("digits-mlp", "digits-mlp-batch8", "mnist-mlp", "mnist-autoencoder", "protein", "protein-long", "parkinsons"),
        *("cifar10-lenet", "cifar10-lenet-batch16", "gpt-characters", "translation"),
    )
)

#: The rates that a cosine starts from.
RATES: dict[str, tuple[float, ...]] = {
    "SGDm": (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001),
    "AdamW": (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001),
    "NadamW": (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001),
}

#: The rate that people take who do not tune.
USUAL = {"SGDm": 0.1, "AdamW": 1e-3}

#: Decoupled weight decay of the family of Adam, torch's default for AdamW.
_DECAY = 0.01


def label_of(base: str, rate: float) -> str:
    """Return the label of a cosine.

    Example:
        >>> label_of("SGDm", 0.1)
        'SGDm-cosine-0.1'
    """
    return f"{base}-cosine-{rate:g}"


def entries(decay: float = 0.0, muon: bool = False) -> tuple[Entry, ...]:
    """Return all methods for a task.

    Args:
        decay: Weight decay (L2) of the family of SGD.
        muon: Whether the network consists of matrices.

    Example:
        >>> [entry.label for entry in entries(muon=True) if "APO" in entry.label]
        ['SGDm-APO', 'AdamW-APO', 'Muon-APO', 'APO-Eigen', 'SGDm-APO-paper', 'AdamW-APO-paper']
        >>> len(entries())
        33
    """
    sgd, adam = {"weight_decay": decay}, {"weight_decay": _DECAY}
    cosine, warm = {"schedule": "cosine"}, {"schedule": "warm-cosine"}
    methods = {"SGDm": ("sgdm", sgd), "AdamW": ("adamw", adam), "NadamW": ("nadamw", adam)}
    return (
        # First, because the first run of a process takes the time that torch needs to start.
        *(
            Entry(label_of(base, rate), method, own | warm | {"lr": rate})
            for base, (method, own) in methods.items()
            for rate in RATES[base]
        ),
        Entry("SGDm-APO", "sgdm-apo-untuned", sgd),
        Entry("AdamW-APO", "adamw-apo-untuned", adam),
        *([Entry("Muon-APO", "muon-apo-untuned", adam)] if muon else []),
        Entry("APO-Eigen", "apo-eigen", sgd),
        Entry("SGDm-APO-paper", "sgdm-apo", sgd | {"preset": "paper", "lr": 0.1}),
        Entry("AdamW-APO-paper", "adamw-apo", adam | {"preset": "paper", "lr": 3e-4}),
        Entry("Prodigy", "prodigy", adam | cosine),
        Entry("D-Adaptation", "d-adaptation", adam | cosine),
        Entry("Schedule-Free-SGD", "schedule-free-sgd-warm", sgd),
        Entry("Schedule-Free-AdamW", "schedule-free-adamw-warm", adam),
        # AdamG has a schedule of its own, and its decay is not scaled down with its steps: none, its default.
        Entry("AdamG", "adamg"),
        Entry("DoG", "dog", sgd),
        Entry("Mechanic", "mechanic", adam | warm),
    )


def base_of(label: str) -> str:
    """Return the optimizer whose tuned cosine a method of :func:`entries` is compared with: SGDm or AdamW.

    Example:
        >>> base_of("SGDm-APO"), base_of("NadamW-cosine-0.001")
        ('SGDm', 'AdamW')
    """
    return "SGDm" if label.startswith(("SGDm", "APO-Eigen", "Schedule-Free-SGD", "DoG")) else "AdamW"


_SMALL_GPT = {"train_pairs": 60, "context": 8, "layers": 1, "dimension": 8, "heads": 1, "batch_size": 16}

#: Of each kind of task: all options, those of the scale smoke, those of the scale cpu.
_KINDS: dict[Any, tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]] = {
    held_out.digits: (held_out.DIGITS, {"data": "generated", "hidden": 16}, {}),
    held_out.images: (held_out.IMAGES, SMOKE, {}),
    held_out.autoencoder: (
        held_out.AUTOENCODER,
        autoencoder.SMOKE,
        {"train_images": 6000, "width": 0.1, "batch_size": 100},
    ),
    held_out.tables: (held_out.TABLES, uci.SMOKE, {"rows": 9000}),
    language.characters: (
        language.CHARACTERS,
        {"data": "generated", **_SMALL_GPT},
        {"train_pairs": 2000, "context": 32, "layers": 2, "dimension": 64, "batch_size": 32},
    ),
    language.words: (
        language.WORDS,
        {key: value for key, value in translation.SMOKE.items() if key in language.WORDS},
        {"train_pairs": 3000, "vocabulary": 1000, "layers": 1, "dimension": 64, "feed_forward": 128, "max_tokens": 768},
    ),
}

#: The options that name the data.
_DATA = ("dataset", "table", "corpus")


def _recipe(
    task: Any,
    name: str,
    title: str,
    epochs: tuple[int, int],
    minutes: tuple[float, float],
    options: Mapping[str, Any] | None = None,
    cpu: Mapping[str, Any] | None = None,
) -> Recipe:
    """Return a task with all methods.

    Args:
        task: Builds the problem.
        name: Of the recipe, without the family's.
        title: For readers.
        epochs: At the scales cpu and paper.
        minutes: For all methods at the scales cpu (two runs at a time) and paper (a guess).
        options: Options of this task, where its kind has others.
        cpu: The same at the scale cpu.
    """
    defaults, smoke, small = _KINDS[task]
    defaults = {**defaults, **(options or {})}
    smoke = smoke if "model" not in defaults else {**smoke, "width": SMOKE_WIDTHS.get(defaults["model"], 0.06)}
    convolutional = defaults.get("model", "mlp") != "mlp"
    chosen = entries(decay=5e-4 if convolutional else 0.0, muon=not convolutional)  # Muon is for matrices
    accuracy = task in (held_out.digits, held_out.images)
    data = "mnist" if task is held_out.autoencoder else next((defaults[key] for key in _DATA if key in defaults), None)
    return Recipe(
        name=f"{FAMILY}-{name}",
        title=f"Without tuning: {title}",
        paper=NOT_IN_PAPER,
        task=task,
        defaults=defaults,
        data=(data,) if data else (),
        scales={
            "smoke": Scale(2, 1, 0.2, smoke, smoke_hyper(chosen, keep=("interval",))),
            "cpu": Scale(epochs[0], 1, minutes[0], {**small, **(cpu or {})}),
            "paper": Scale(epochs[1], 1, minutes[1], {"precision": "bf16-autocast"} if convolutional else {}),
        },
        entries=chosen,
        metric="test_accuracy" if accuracy else "test_loss",
        goal="max" if accuracy else "min",
        notes="One setting for all tasks, against rates that were tuned for this one. Not in the paper.",
    )


def _digits(variant: str, batch_size: int, epochs: tuple[int, int], minutes: tuple[float, float]) -> Recipe:
    title = f"digits of 8 x 8 pixels, {_length(variant)}batches of {batch_size}"
    return _recipe(held_out.digits, f"digits-mlp{variant}", title, epochs, minutes, {"batch_size": batch_size})


def _mnist(variant: str, batch_size: int, epochs: tuple[int, int], minutes: tuple[float, float]) -> Recipe:
    title = f"a perceptron on MNIST, {_length(variant)}batches of {batch_size}"
    options = {"dataset": "mnist", "model": "mlp", "augment": False, "batch_size": batch_size}
    few = {"train_images": 6000, "test_images": 2000, "width": 0.1}
    return _recipe(held_out.images, f"mnist-mlp{variant}", title, epochs, minutes, options, few)


def _table(table: str, variant: str, epochs: tuple[int, int], minutes: tuple[float, float]) -> Recipe:
    title = f"regression on UCI {table.capitalize()}" + (", long" if variant else "")
    return _recipe(held_out.tables, f"{table}{variant}", title, epochs, minutes, {"table": table})


def _network(
    dataset: str,
    model: str,
    variant: str,
    batch_size: int,
    epochs: tuple[int, int],
    minutes: tuple[float, float],
    cpu: Mapping[str, Any] | None = None,
) -> Recipe:
    title = f"{TITLES[model]} on {TITLES[dataset]}, {_length(variant)}batches of {batch_size}"
    few: dict[str, Any] = {"train_images": 4500, "test_images": 1500, "batch_size": min(batch_size, 64)}
    if model not in ("lenet", "alexnet"):  # deep networks cost more on two cores
        few |= {"train_images": 2250, "batch_size": 32}
    options = {"dataset": dataset, "model": model, "batch_size": batch_size}
    return _recipe(
        held_out.images, f"{dataset}-{model}{variant}", title, epochs, minutes, options, {**few, **(cpu or {})}
    )


def _length(variant: str) -> str:
    return "long, " if variant == "-long" else ""


_RECIPES = (
    _digits("", 32, (8, 8), (1.2, 4)),
    _digits("-long", 32, (24, 24), (1.4, 8)),
    _digits("-batch8", 8, (5, 5), (1.4, 8)),
    _mnist("", 100, (6, 10), (1.4, 15)),
    _mnist("-long", 100, (20, 40), (2, 60)),
    _mnist("-batch500", 500, (30, 20), (1.4, 10)),
    _recipe(held_out.autoencoder, "mnist-autoencoder", "a deep autoencoder on MNIST", (8, 60), (1.6, 20)),
    _table("protein", "", (6, 20), (1.2, 10)),
    _table("protein", "-long", (20, 100), (1.4, 50)),
    _table("parkinsons", "", (10, 50), (1.2, 5)),
    _table("parkinsons", "-long", (40, 300), (1.4, 25)),
    _network("cifar10", "lenet", "", 128, (5, 20), (2, 20)),
    _network("cifar10", "lenet", "-long", 128, (15, 60), (4, 60)),
    _network("cifar10", "lenet", "-batch16", 16, (3, 10), (2.5, 60)),
    _network("cifar10", "alexnet", "", 128, (6, 20), (2.5, 30), {"width": 0.25}),
    _network("cifar10", "resnet32", "", 128, (3, 20), (5, 60), {"width": 0.25}),
    _network("cifar10", "wrn-16-4", "", 128, (3, 20), (4, 60), {"width": 0.125}),
    _network("cifar100", "resnet32", "", 128, (3, 20), (5, 60), {"width": 0.25}),
    _recipe(language.characters, "gpt-characters", "a small GPT on characters", (2, 10), (2.5, 20)),
    _recipe(language.characters, "gpt-characters-long", "a small GPT on characters, long", (6, 30), (6, 60)),
    _recipe(language.words, "translation", "a Transformer on Multi30k", (6, 15), (4, 20)),
)

RECIPES = by_name(*_RECIPES)
