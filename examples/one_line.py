"""A plain training loop that learns its own learning rate: one line is new.

python examples/one_line.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import apo


def main(epochs: int = 20) -> float:
    torch.manual_seed(0)
    data = load_digits()
    inputs = torch.tensor(data.data / 16, dtype=torch.float32)
    train, test = train_test_split(range(len(inputs)), test_size=0.25, stratify=data.target, random_state=0)
    digits = TensorDataset(inputs, torch.tensor(data.target))
    loader = DataLoader(torch.utils.data.Subset(digits, train), batch_size=32, shuffle=True)

    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)  # a rate that is far too small, on purpose
    # The new line; all others stay as they were.
    tuner = apo.attach(optimizer, model, criterion, total_steps=epochs * len(loader))

    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()

    with torch.no_grad():
        x, y = digits[test]
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    print(f"test accuracy {accuracy:.1%}, learned rate {optimizer.param_groups[0]['lr']:.2g}")
    print("rate over time:", ", ".join(f"{rate:.2g}" for rate in tuner.history.column("lr/0")[::15]))
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    main(parser.parse_args().epochs)
