"""An Accelerate script that learns its own learning rate: one line is new.

Needs `pip install apo-optim[accelerate,demo]`.

python examples/accelerate_digits.py
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import apo
from apo.integrations import accelerate as apo_accelerate


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


def loader(split: str) -> DataLoader:
    inputs, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(inputs / 16, dtype=torch.float32), torch.tensor(labels))
    train, test = train_test_split(range(len(digits)), test_size=0.25, stratify=labels, random_state=0)
    order = torch.Generator().manual_seed(0)
    if split == "test":
        return DataLoader(Subset(digits, test), batch_size=len(test))
    return DataLoader(Subset(digits, train), batch_size=32, shuffle=True, generator=order)


def train(model: nn.Module, epochs: int, accumulate: int = 1) -> apo.Tuner:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)  # a rate that is far too small, on purpose
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader("train"))
    tuner = apo_accelerate.attach(accelerator, optimizer, model, criterion)  # the new line
    for _ in range(epochs):
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(criterion(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return tuner


def main(epochs: int = 20) -> float:
    torch.manual_seed(0)
    model = network()
    rates = train(model, epochs).history.column("lr/0")
    ((x, y),) = loader("test")
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    print(f"test accuracy {accuracy:.1%}, learned rate {rates[-1]:.2g}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    main(parser.parse_args().epochs)
