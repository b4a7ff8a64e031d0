"""What is held out is not trained on, and a guess is the best prediction that does not look."""

from __future__ import annotations

import gzip
import sys

import pytest
import torch
from torch import nn

from apo_experiments.data import tables as tables_data
from apo_experiments.errors import UserError
from apo_experiments.recipe import Setting
from apo_experiments.tasks import held_out, language

CPU = Setting(0, torch.device("cpu"), None)


def rows(tensor: torch.Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in tensor.flatten(1).tolist()}


def test_parts_of_a_table_do_not_overlap_and_are_the_same_for_every_seed():
    inputs = torch.arange(100.0)[:, None]
    train, valid, test = held_out._parts(inputs, inputs, CPU.device)
    assert [len(part[0]) for part in (train, valid, test)] == [70, 10, 20]
    assert rows(train[0]) | rows(valid[0]) | rows(test[0]) == rows(inputs)
    assert torch.equal(held_out._parts(inputs, inputs, CPU.device)[2][0], test[0])


def test_pictures_for_choosing_are_not_in_the_training_batches():
    options = held_out.AUTOENCODER | {"data": "generated", "width": 0.02, "batch_size": 9, "train_images": 100}
    problem = held_out.autoencoder(options, CPU)
    assert problem.batches.steps_per_epoch == 10  # of 90 pictures


def test_the_guess_of_a_regression_is_the_mean_of_the_training_targets():
    problem = held_out.tables(held_out.TABLES | {"data": "generated"}, CPU)
    constant = nn.Sequential(nn.Linear(problem.model.layers[0].in_features, 1))
    nn.init.zeros_(constant[0].weight)
    batches = [problem.batches.next()[1] for _ in range(problem.batches.steps_per_epoch)]
    nn.init.constant_(constant[0].bias, float(torch.cat(batches).mean()))
    metrics = problem.evaluate(constant)
    assert metrics["test_loss"] == pytest.approx(metrics["guess"], rel=0.02)


def test_the_guess_of_a_text_is_by_frequency():
    train, test = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1])
    # One more of each: 4/6 and 2/6.
    expected = -(torch.tensor(4 / 6).log() + torch.tensor(2 / 6).log()) / 2
    assert language._by_frequency(train, test, 2) == pytest.approx(float(expected))


def test_digits_come_from_the_folder_of_the_data_or_from_scikit_learn(tmp_path, monkeypatch):
    pixels, labels = tables_data.digits(tmp_path)
    assert pixels.shape == (1797, 64) and float(pixels.max()) == 1.0 and labels.bincount().min() > 170
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match="The digits come with scikit-learn"):
        tables_data.digits(tmp_path)
    (tmp_path / "digits").mkdir()
    content = torch.cat([pixels * 16, labels[:, None]], 1).long()[:3].tolist()
    text = "\n".join(",".join(map(str, row)) for row in content)
    (tmp_path / tables_data.DIGITS).write_bytes(gzip.compress(text.encode()))
    again = tables_data.digits(tmp_path)
    assert torch.equal(again[0], pixels[:3]) and torch.equal(again[1], labels[:3])
