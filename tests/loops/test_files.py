"""What a loop saves: plain data without classes of apo, and without the batches that it trained on."""

from __future__ import annotations

import io
import json
import pickletools
import zipfile

import pytest
import torch
from tests.loops.loop import assert_at_work, batches, digit_batches, mlp
from torch import nn
from torch.optim import lr_scheduler

import apo


def trained(steps=25, scheduler_of=None):
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    tuner = apo.attach(optimizer, model, criterion)
    scheduler = scheduler_of(optimizer) if scheduler_of else None
    for x, y in digit_batches(steps):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
    assert_at_work(tuner, 1e-3)
    return model, optimizer, scheduler


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file


def classes_of_apo(file):
    """Return the names from apo that a file made by ``torch.save`` asks for when it is loaded."""
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        operations = list(pickletools.genops(archive.read(name)))
    named = [str(argument) for operation, argument, _ in operations if operation.name in ("GLOBAL", "STACK_GLOBAL")]
    return [name for name in named if name.startswith("apo")]


SCHEDULERS = {
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 100),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=100),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 10),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedulers_file_holds_no_class_of_apo(name):
    _, _, scheduler = trained(scheduler_of=SCHEDULERS[name])
    assert classes_of_apo(saved(scheduler.state_dict())) == []


def test_an_optimizers_file_holds_no_class_of_apo():
    _, optimizer, _ = trained()
    assert classes_of_apo(saved(optimizer.state_dict())) == []


def test_a_whole_network_that_is_saved_while_attached_holds_no_class_of_apo():
    model, _, _ = trained()
    assert classes_of_apo(saved(model)) == []


def test_the_rate_in_force_can_be_written_by_yaml_and_json():
    yaml = pytest.importorskip("yaml")
    _, optimizer, _ = trained()
    rate = optimizer.param_groups[0]["lr"]
    assert yaml.safe_load(yaml.safe_dump({"lr": rate}))["lr"] == pytest.approx(float(rate))
    assert json.loads(json.dumps({"lr": rate}))["lr"] == pytest.approx(float(rate))


def test_an_optimizers_file_does_not_carry_a_training_batch():
    torch.manual_seed(0)
    inputs, labels = torch.randn(256, 4096), torch.randint(10, (256,))
    sizes = []
    for attach in (apo.attach, None):
        model, criterion = nn.Linear(4096, 10), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        tuner = attach(optimizer, model, criterion) if attach else None
        for x, y in batches(20, inputs, labels):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        if tuner is not None:
            assert_at_work(tuner, 1e-3)
        sizes.append(saved(optimizer.state_dict()).getbuffer().nbytes)
    assert sizes[0] < sizes[1] + 64 * 1024, f"{sizes[1]} bytes without apo, {sizes[0]} with"
