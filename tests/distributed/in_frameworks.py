"""Started by torchrun: the same small trainings in Lightning, Accelerate and the Hugging Face Trainer.

Usage: in_frameworks.py FOLDER
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.distributed.training import GLOBAL_BATCH, network
from tests.integrations.frameworks import example

import apo

STEPS, INTERVAL = 30, 4
Outcome = dict[str, Any]


def data() -> TensorDataset:
    """Return exactly as many batches as there are steps."""
    generator = torch.Generator().manual_seed(5)
    size = STEPS * GLOBAL_BATCH
    return TensorDataset(torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator))


def loader(processes: int, sampler: Sampler | None = None) -> DataLoader:
    """Return batches in order; the processes' batches of a step make up the global one."""
    return DataLoader(data(), batch_size=GLOBAL_BATCH // processes, sampler=sampler)


class _Share(Sampler):
    """Every second index, for each of two processes; made before they know of each other."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank(), len(data()), 2))

    def __len__(self) -> int:
        return len(data()) // 2


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def outcome(model: nn.Module, tuner: apo.Tuner) -> Outcome:
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {"weights": weights, "rates": tuner.history.column("lr/0"), "losses": tuner.history.column("loss")}


def plain(accumulate: int = 1) -> Outcome:
    """Train in one process, without a framework."""
    model, criterion = network(), nn.CrossEntropyLoss()
    optimizer = sgd(model)
    tuner = apo.attach(optimizer, model, criterion, interval=INTERVAL)
    for index, (x, y) in enumerate(loader(1), start=1):
        (criterion(model(x), y) / accumulate).backward()
        if index % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return outcome(model, tuner)


def lightning(one_line: bool) -> Outcome:
    """Train with the callback on a part of the module, or with one line in `configure_optimizers` on all of it."""
    import lightning.pytorch as pl

    from apo.integrations.lightning import APOCallback, log_to

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.criterion = network(), nn.CrossEntropyLoss()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.network(x)

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
            x, y = batch
            return self.criterion(self(x) if one_line else self.network(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = sgd(self)
            if one_line:
                self.tuner = apo.attach(optimizer, self, self.criterion, interval=INTERVAL, on_meta_step=log_to(self))
            return optimizer

    module, callback = Module(), APOCallback(network="network", interval=INTERVAL)
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    many = {"strategy": "ddp", "accelerator": "cpu", "devices": 2, "use_distributed_sampler": False}  # theirs shuffles
    own = pl.Trainer(max_epochs=1, callbacks=[] if one_line else [callback], **many, **quiet)
    own.fit(module, loader(2, _Share()))
    assert type(own.strategy).__name__ == "DDPStrategy" and dist.get_world_size() == 2
    tuner = module.tuner if one_line else callback.tuner
    assert tuner is not None
    return outcome(module.network, tuner)


def accelerate(attach: str, accumulate: int) -> Outcome:
    from accelerate import Accelerator

    from apo.integrations import accelerate as apo_accelerate

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    inner, criterion = network(), nn.CrossEntropyLoss()
    own = sgd(inner)
    if attach == "before":
        tuner = apo.attach(own, inner, criterion, interval=INTERVAL)
    model, optimizer, batches = accelerator.prepare(inner, own, loader(2))
    if attach == "after":
        tuner = apo_accelerate.attach(accelerator, optimizer, model, criterion, interval=INTERVAL)
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(criterion(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return outcome(inner, tuner)


def trainer(folder: Path, processes: int) -> Outcome:
    """Train the example's network on sentences of one length: padding would weigh the processes differently."""
    import transformers

    text = example("huggingface_text")
    transformers.set_seed(0)
    model = text.network()
    by_length = [s for s in text.sentences("train") if len(s["input_ids"]) == 6]
    options = {
        "max_steps": 20,
        "optim": "sgd",
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": 8 // processes,
        "gradient_accumulation_steps": 2,
    }
    own, first = text.trainer_of(model, str(folder / "trainer"), **options)
    first.detach()
    own.train_dataset, own.optimizer = by_length[:56], None
    tuner = text.apo_transformers.attach(own, interval=INTERVAL)
    own.train()
    return outcome(model, tuner)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    found = {
        "lightning, callback": lightning(one_line=False),
        "lightning, one line": lightning(one_line=True),
        "accelerate, after prepare": accelerate("after", 2),
        "accelerate, before prepare": accelerate("before", 1),
        "trainer": trainer(folder, 2),
    }
    torch.save(found, folder / f"outcome-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
    # Threads of torch that outlive the frameworks' process groups have aborted the interpreter's shutdown, once in a
    # while ("terminate called without an active exception"). All that is tested has happened and is saved by now.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
