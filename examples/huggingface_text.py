"""A Hugging Face Trainer learns its own learning rate: one line is new. Needs `pip install apo-optim[transformers]`.

A small GPT-2, built from a config, learns to add numbers that are written in words. Nothing is downloaded.

python examples/huggingface_text.py
"""

from __future__ import annotations

import argparse
import random
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import apo
from apo.integrations import transformers as apo_transformers

ONES = "zero one two three four five six seven eight nine ten eleven twelve".split()
TEENS = "thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
NUMBERS = [*ONES, *TEENS, "twenty", *(f"twenty {word}" for word in ONES[1:5])]
WORDS = ["<pad>", "<end>", "plus", "is", *ONES, *TEENS, "twenty"]


def sentences(split: str) -> list[dict[str, list[int]]]:
    """Returns every sum of two numbers up to twelve, a fifth of them for testing, as numbered words."""
    pairs = [(a, b) for a in range(13) for b in range(13)]
    random.Random(0).shuffle(pairs)
    chosen = pairs[:134] if split == "train" else pairs[134:]
    texts = [f"{NUMBERS[a]} plus {NUMBERS[b]} is {NUMBERS[a + b]} <end>" for a, b in chosen]
    return [{"input_ids": [WORDS.index(word) for word in text.split()]} for text in texts]


def collate(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pads the sentences; labels of -100 leave the padding out of the loss and out of the function-space term."""
    length = max(len(example["input_ids"]) for example in examples)
    ids = torch.tensor([example["input_ids"] + [0] * (length - len(example["input_ids"])) for example in examples])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def network(dropout: float = 0.0) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=len(WORDS), n_positions=8, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1)
        | {}
    )


def trainer_of(model: GPT2LMHeadModel, folder: str, **options) -> tuple[Trainer, apo.Tuner]:
    defaults = {"per_device_train_batch_size": 16, "learning_rate": 1e-7, "use_cpu": True, "save_strategy": "no"}
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
    arguments = TrainingArguments(folder, **(defaults | quiet | options))
    trainer = Trainer(model, arguments, train_dataset=sentences("train"), data_collator=collate)
    tuner = apo_transformers.attach(trainer)  # the new line
    return trainer, tuner
