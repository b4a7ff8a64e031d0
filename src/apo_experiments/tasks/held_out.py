"""Tasks that always hold data out: a part for choosing settings, and test data for the report alone.

All of them report ``test_...`` and ``valid_...`` metrics, and ``guess``: the test metric of the best prediction that
does not look at its input, the zero from which :mod:`apo_experiments.no_tuning` counts what was learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apo_experiments.data import tables as tables_data
from apo_experiments.problem import Problem
from apo_experiments.recipe import Setting
from apo_experiments.tasks import autoencoder as whole_autoencoder
from apo_experiments.tasks import images as whole_images
from apo_experiments.tasks import uci as whole_uci
from apo_experiments.tasks.evaluation import Part, judged

#: Options of each task; those of the tasks that they are made of, where these say what they mean.
IMAGES = {key: value for key, value in whole_images.DEFAULTS.items() if key != "validation"}
AUTOENCODER = whole_autoencoder.DEFAULTS
TABLES = whole_uci.DEFAULTS
DIGITS: dict[str, Any] = {"data": "official", "rows": None, "hidden": 100, "batch_size": 32}


def images(options: Mapping[str, Any], setting: Setting) -> Problem:
    """Build image classification with a tenth of the training images, at most 5,000, held out.

    Example:
        >>> options = IMAGES | {"data": "generated", "model": "lenet", "train_images": 256}
        >>> problem = images(options, Setting(0, torch.device("cpu"), None))
        >>> metrics = problem.evaluate(problem.model)
        >>> sorted(metrics), metrics["guess"]
        (['guess', 'test_accuracy', 'test_loss', 'valid_accuracy', 'valid_loss'], 10.0)
    """
    problem = whole_images.images({**options, "validation": True}, setting)
    classes = [module for module in problem.model.modules() if isinstance(module, nn.Linear)][-1].out_features
    return replace(problem, evaluate=lambda model: {**problem.evaluate(model), "guess": 100 / classes})


def digits(options: Mapping[str, Any], setting: Setting) -> Problem:
    """Build a perceptron with two hidden layers on 8 x 8 digits; a tenth is for choosing, a fifth for the test.

    Example:
        >>> problem = digits(DIGITS | {"data": "generated"}, Setting(0, torch.device("cpu"), None))
        >>> problem.batches.next()[0].shape
        torch.Size([32, 64])
    """
    if options["data"] == "official":
        inputs, labels = tables_data.digits(setting.data_dir)
    else:
        inputs, labels = _generated_digits()
    train, valid, test = _parts(inputs[: options["rows"]], labels[: options["rows"]], setting.device)
    guess = 100 * float((test[1] == train[1].mode().values).float().mean())
    judge = judged({"valid": valid, "test": test}, whole_images.MEASURES, guess)
    return whole_uci.perceptron(train, 10, F.cross_entropy, judge, options, setting)


def tables(options: Mapping[str, Any], setting: Setting) -> Problem:
    """Build regression on a table; a tenth of its rows is for choosing, a fifth for the test.

    Example:
        >>> problem = tables(TABLES | {"data": "generated"}, Setting(0, torch.device("cpu"), None))
        >>> sorted(problem.evaluate(problem.model))
        ['guess', 'test_loss', 'valid_loss']
    """
    train, valid, test = _parts(*whole_uci.table_of(options, setting), setting.device)
    guess = float(F.mse_loss(train[1].mean(0).expand_as(test[1]), test[1]))
    judge = judged({"valid": valid, "test": test}, {"loss": F.mse_loss}, guess)
    return whole_uci.perceptron(train, train[1].shape[1], F.mse_loss, judge, options, setting)


def autoencoder(options: Mapping[str, Any], setting: Setting) -> Problem:
    """Build the deep autoencoder with a tenth of the training pictures held out; the penalty is not in the metrics.

    Example:
        >>> options = AUTOENCODER | {"data": "generated", "width": 0.02, "batch_size": 64, "train_images": 128}
        >>> problem = autoencoder(options, Setting(0, torch.device("cpu"), None))
        >>> sorted(problem.evaluate(problem.model))
        ['guess', 'test_loss', 'valid_loss']
    """
    train, test = whole_autoencoder.pictures_of(options, setting)
    held_out = len(train) // 10
    train, valid = train[held_out:], train[:held_out]
    mean = train.mean(0).clamp(1e-4, 1 - 1e-4)
    guess = float(F.binary_cross_entropy(mean.expand_as(test), test, reduction="sum") / len(test))
    judge = judged({"valid": (valid, valid), "test": (test, test)}, {"loss": whole_autoencoder.entropy}, guess)
    return replace(whole_autoencoder.built(train, options, setting), evaluate=judge)


def _parts(inputs: Tensor, targets: Tensor, device: torch.device) -> tuple[Part, Part, Part]:
    """Split rows at random, in the same way for every seed: 70% to train on, 10% to choose on, 20% to test on."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    inputs, targets = inputs[order].to(device), targets[order].to(device)
    tenth = len(inputs) // 10
    bounds = (slice(3 * tenth, None), slice(0, tenth), slice(tenth, 3 * tenth))
    train, valid, test = ((inputs[part], targets[part]) for part in bounds)
    return train, valid, test


def _generated_digits(rows: int = 256) -> Part:
    """Return noisy copies of ten patterns."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(rows) % 10
    patterns = torch.rand(10, 64, generator=generator)
    return (patterns[labels] + 0.3 * torch.randn(rows, 64, generator=generator)).clamp(0, 1), labels
