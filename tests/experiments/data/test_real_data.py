"""The real files, where they are: set APO_DATA to run these checks of counts, channel means and defaults."""

from __future__ import annotations

import os

import pytest
import torch

from apo_experiments.data import images, tables, text
from apo_experiments.data.locate import state
from apo_experiments.recipes import RECIPES, plan
from apo_experiments.train import train

pytestmark = pytest.mark.skipif(not os.environ.get("APO_DATA"), reason="APO_DATA is not set")

# Counts, and the mean and deviation of each channel as published or commonly used, to four digits.
IMAGES = {
    "mnist": (60_000, 10_000, (0.1307,), (0.3081,)),
    "fashion-mnist": (60_000, 10_000, (0.2860,), (0.3530,)),
    "cifar10": (50_000, 10_000, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": (50_000, 10_000, (0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn": (73_257, 26_032, (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
}
TABLES = {"protein": (45_730, 9, 1), "parkinsons": (5_875, 19, 2), "slice": (53_500, 384, 1)}


def present(name: str) -> None:
    if state(name) != "here":
        pytest.skip(f"{name} is not in APO_DATA")


@pytest.mark.parametrize("name", IMAGES)
def test_images_have_their_published_counts_and_means(name: str) -> None:
    present(name)
    train, test, mean, std = IMAGES[name]
    loaded = images.load(name)
    assert (len(loaded.train_images), len(loaded.test_images)) == (train, test)
    assert loaded.mean == pytest.approx(mean, abs=1e-4) and loaded.std == pytest.approx(std, abs=1e-4)
    assert len(loaded.train_labels.unique()) == loaded.classes


@pytest.mark.parametrize("name", TABLES)
def test_tables_have_their_published_shapes(name: str) -> None:
    present(name)
    rows, inputs, targets = TABLES[name]
    loaded = tables.load(name)
    assert loaded.inputs.shape == (rows, inputs) and loaded.targets.shape == (rows, targets)
    torch.testing.assert_close(loaded.targets.mean(0), torch.zeros(targets), rtol=0, atol=1e-5)


def test_multi30k_has_its_published_counts() -> None:
    present("multi30k")
    loaded = text.load("multi30k")
    assert [len(split) for split in (loaded.train, loaded.valid, loaded.test)] == [29_000, 1_014, 1_000]


@pytest.mark.slow
def test_sgdm_on_translation_survives_its_first_epoch(tmp_path) -> None:
    """At a fixed rate of 0.3, its former default, the loss was nan before the epoch's end."""
    present("multi30k")
    (config,) = plan(RECIPES["translation"], "cpu", ["SGDm"], overrides={"epochs": 1})
    record = train(config, root=tmp_path)
    assert record.summary is not None and not record.summary["diverged"]


def test_tatoeba_is_complete_and_no_sentence_is_in_two_splits() -> None:
    present("tatoeba")
    loaded = text.load("tatoeba")
    assert len(loaded.train) + len(loaded.valid) + len(loaded.test) >= 169_813
    for side in (0, 1):
        train, valid, test = ({pair[side] for pair in split} for split in (loaded.train, loaded.valid, loaded.test))
        assert not train & (valid | test) and not valid & test
