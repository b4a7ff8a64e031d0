"""An explicit loop with `apo.APO`: the tuner runs forward, backward, step and meta-step.

python examples/explicit.py
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import apo


def main(epochs: int = 20) -> float:
    torch.manual_seed(0)
    data = load_digits()
    split = train_test_split(data.data / 16, data.target, test_size=0.25, stratify=data.target, random_state=0)
    inputs, test_inputs = (torch.tensor(part, dtype=torch.float32) for part in split[:2])
    labels, test_labels = (torch.tensor(part) for part in split[2:])

    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = epochs * math.ceil(len(inputs) / 32)
    tuner = apo.APO(optimizer, model, F.cross_entropy, total_steps=steps)
    tuner.on_meta_step(report)

    for _ in range(epochs):
        for batch in torch.randperm(len(inputs)).split(32):
            tuner.step(inputs[batch], labels[batch])

    with torch.no_grad():
        accuracy = (model(test_inputs).argmax(1) == test_labels).float().mean().item()
    print(f"test accuracy {accuracy:.1%}, learned rate {optimizer.param_groups[0]['lr']:.2g}")
    return accuracy


def report(record: apo.MetaStep) -> None:
    """Print every hundredth step: the terms of the objective Q and the rate."""
    if record.step % 100 == 0:
        terms = f"loss {record.loss:.4f}, look-ahead {record.look_ahead_loss:.4f}, FSD {record.fsd:.5f}"
        print(f"step {record.step:4d}: {terms}, rate {record.lr[0]:.2g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    main(parser.parse_args().epochs)
