"""A Hugging Face Trainer learns its own learning rate: one line is new.

A small GPT-2, built from a config, learns to count in words. Nothing is downloaded.
Needs `pip install apo-optim[transformers]`.

python examples/huggingface_text.py
"""

from __future__ import annotations

import argparse
import random
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments, set_seed

import apo
from apo.integrations import transformers as apo_transformers

NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty"""
WORDS = ["<pad>", "<end>", *NUMBERS.split()]


def sentences(split: str) -> list[dict[str, list[int]]]:
    """Returns all sentences that count by -3 to 3, such as "two four six eight <end>", a fifth of them for testing."""
    numbers = WORDS[2:]
    choices = [(a, by, n) for a in range(21) for by in (-3, -2, -1, 1, 2, 3) for n in range(4, 8)]
    counts = [range(a, a + n * by, by) for a, by, n in choices if 0 <= a + (n - 1) * by <= 20]
    random.Random(0).shuffle(counts)
    chosen = counts[len(counts) // 5 :] if split == "train" else counts[: len(counts) // 5]
    texts = [" ".join([*(numbers[i] for i in count), "<end>"]) for count in chosen]
    return [{"input_ids": [WORDS.index(word) for word in text.split()]} for text in texts]


def collate(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pads the sentences; labels of -100 leave the padding out of the loss and out of the function-space term."""
    length = max(len(example["input_ids"]) for example in examples)
    ids = torch.tensor([example["input_ids"] + [0] * (length - len(example["input_ids"])) for example in examples])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def network(dropout: float = 0.0) -> GPT2LMHeadModel:
    size = {"vocab_size": len(WORDS), "n_positions": 16, "n_embd": 64, "n_layer": 2, "n_head": 4}
    dropouts = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**size, **dropouts, bos_token_id=1, eos_token_id=1))


def trainer_of(model: GPT2LMHeadModel, folder: str, **options) -> tuple[Trainer, apo.Tuner]:
    chosen = {"use_cpu": True, "per_device_train_batch_size": 8, "learning_rate": 1e-7}  # far too small, on purpose
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    arguments = TrainingArguments(folder, **(chosen | quiet | options))
    trainer = Trainer(model, arguments, train_dataset=sentences("train"), data_collator=collate)
    trainer.remove_callback(PrinterCallback)
    return trainer, apo_transformers.attach(trainer)  # the new line: attach


def correct(model: GPT2LMHeadModel) -> float:
    """Returns the share of numbers that are predicted, of those that the two before them determine."""
    batch = collate(sentences("test"))
    with torch.no_grad():
        predicted = model.eval()(**batch).logits[:, 1:-1].argmax(-1)
    words = batch["input_ids"][:, 2:]
    return (predicted == words)[words > 1].float().mean().item()


def main(epochs: int = 60) -> float:
    torch.set_num_threads(1)  # the network is tiny: threads would cost more than they give
    set_seed(0)
    model = network()
    with tempfile.TemporaryDirectory() as folder:
        trainer, tuner = trainer_of(model, folder, num_train_epochs=epochs)
        trainer.train()
    accuracy = correct(model)
    print(f"test accuracy {accuracy:.1%}, loss {tuner.history[-1].loss:.2f}")
    print("rate over time:", ", ".join(f"{rate:.2g}" for rate in tuner.history.column("lr/0")[::10]))
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=60)
    main(parser.parse_args().epochs)
