"""Lightning learns its own learning rate: one callback is new.

Needs `pip install apo-optim[lightning,demo]`.

python examples/lightning_digits.py
"""

from __future__ import annotations

import argparse
import logging
import warnings

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from apo.integrations.lightning import APOCallback


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-7)  # a rate that is far too small, on purpose


def loader(split: str) -> DataLoader:
    inputs, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(inputs / 16, dtype=torch.float32), torch.tensor(labels))
    train, test = train_test_split(range(len(digits)), test_size=0.25, stratify=labels, random_state=0)
    order = torch.Generator().manual_seed(0)
    if split == "test":
        return DataLoader(Subset(digits, test), batch_size=len(test))
    return DataLoader(Subset(digits, train), batch_size=32, shuffle=True, generator=order)


def train(module: Digits, epochs: int, **options) -> APOCallback:
    callback = APOCallback()  # the new line; it goes into the trainer's callbacks
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    options = quiet | {"enable_checkpointing": False} | options
    pl.Trainer(max_epochs=epochs, callbacks=[callback], **options).fit(module, loader("train"))
    return callback


def main(epochs: int = 20) -> float:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")  # its advice on the number of workers
    pl.seed_everything(0, verbose=False)
    module = Digits()
    rates = train(module, epochs).tuner.history.column("lr/0")
    ((x, y),) = loader("test")
    with torch.no_grad():
        accuracy = (module(x).argmax(1) == y).float().mean().item()
    print(f"test accuracy {accuracy:.1%}, learned rate {rates[-1]:.2g}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    main(parser.parse_args().epochs)
