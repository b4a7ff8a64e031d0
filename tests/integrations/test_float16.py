"""On a GPU: the float16 of each framework, whose GradScaler the tuner has to know of."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.integrations.frameworks import example
from torch import nn

import apo

pytestmark = [pytest.mark.gpu, pytest.mark.integrations]


def watched(layer: nn.Module) -> list[torch.dtype]:
    """Returns the list into which the precision of every pass through a layer goes."""
    seen: list[torch.dtype] = []
    layer.register_forward_hook(lambda layer, args, output: seen.append(output.dtype))
    return seen


def assert_trained_in_float16(tuner: apo.Tuner, model: nn.Module, seen: list[torch.dtype], steps: int) -> None:
    assert tuner.engine.scaler is not None and tuner.engine.scaler.is_enabled()
    assert set(seen) == {torch.float16} and len(seen) > steps  # the repeated passes as well
    assert steps - 8 <= tuner.steps <= steps  # the scale of 65536 that it starts from may be too large at first
    assert tuner.history[-1].loss < 0.9 * tuner.history[0].loss < 10
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_lightning():
    pytest.importorskip("lightning.pytorch")
    pytest.importorskip("sklearn")
    digits = example("lightning_digits")
    module = digits.Digits()
    seen = watched(module.network[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuner = digits.train(module, 2, accelerator="gpu", devices=1, precision="16-mixed").tuner
    assert_trained_in_float16(tuner, module, seen, 2 * len(digits.loader("train")))


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    from apo.integrations import accelerate as apo_accelerate

    accelerator = accelerate.Accelerator(mixed_precision="fp16")
    model, criterion = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)), nn.CrossEntropyLoss()
    seen = watched(model[0])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-7))
    tuner = apo_accelerate.attach(accelerator, optimizer, model, criterion)
    for _ in range(100):
        x = torch.randn(32, 6, device=accelerator.device)
        accelerator.backward(criterion(model(x), x[:, :3].argmax(1)))
        optimizer.step()
        optimizer.zero_grad()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert_trained_in_float16(tuner, model, seen, 100)


def test_trainer(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = example("huggingface_text")
    model = text.network()
    seen = watched(model.transformer.h[0].mlp.c_fc)
    trainer, tuner = text.trainer_of(model, str(tmp_path), max_steps=60, use_cpu=False, fp16=True)
    trainer.train()
    assert_trained_in_float16(tuner, model, seen, 60)
