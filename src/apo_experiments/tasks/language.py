"""Language with data held out: a small GPT on characters, and translation judged by the likelihood of its words.

Corpora have their own validation and test texts. Metrics as in :mod:`apo_experiments.tasks.held_out`; ``guess`` is the
loss of a guess by frequency alone. Nothing here needs a package beside torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apo_experiments.data.streams import TextBatches, WindowBatches, windows
from apo_experiments.data.vocabulary import PAD, WordVocabulary, as_numbers, encoded
from apo_experiments.models.gpt import GPT
from apo_experiments.models.transformer import Transformer
from apo_experiments.problem import Problem
from apo_experiments.recipe import Setting
from apo_experiments.tasks.evaluation import judged
from apo_experiments.tasks.translation import NextWord, corpus_of, next_words

#: Options: the corpus, of which the English side is read, and the first so many of its pairs; the network.
CHARACTERS: dict[str, Any] = {
    "corpus": "multi30k",
    "data": "official",
    "train_pairs": None,
    "context": 128,
    "layers": 4,
    "dimension": 128,
    "heads": 4,
    "dropout": 0.0,
    "batch_size": 64,
}

#: Options as for :mod:`apo_experiments.tasks.translation`; ``vocabulary`` counts whole words.
WORDS: dict[str, Any] = {
    "corpus": "multi30k",
    "data": "official",
    "train_pairs": None,
    "vocabulary": 8000,
    "layers": 3,
    "dimension": 256,
    "feed_forward": 512,
    "heads": 4,
    "dropout": 0.1,
    "max_tokens": 4096,
}

#: Windows that are evaluated at a time.
_CHUNK = 256


def characters(options: Mapping[str, Any], setting: Setting) -> Problem:
    """Build a GPT that guesses the next character of an English text.

    Example:
        >>> sizes = {"train_pairs": 60, "context": 8, "layers": 1, "dimension": 8, "heads": 1, "batch_size": 4}
        >>> problem = characters(CHARACTERS | sizes | {"data": "generated"}, Setting(0, torch.device("cpu"), None))
        >>> sorted(problem.evaluate(problem.model))
        ['guess', 'test_loss', 'valid_loss']
    """
    corpus = corpus_of(options, setting)
    texts = ["\n".join(target for _, target in pairs) for pairs in (corpus.train, corpus.valid, corpus.test)]
    alphabet = sorted(set(texts[0]))
    train, valid, test = (as_numbers(text, alphabet).to(setting.device) for text in texts)
    context = int(options["context"])
    sizes = {name: options[name] for name in ("layers", "dimension", "heads", "dropout")}
    model = GPT(len(alphabet), context, **sizes).to(setting.device)
    stream = WindowBatches(train, context, options["batch_size"], setting.seed, setting.device)
    guess = _by_frequency(train, test[1:], len(alphabet))
    parts = {"valid": windows(valid, context), "test": windows(test, context)}
    measures = {"loss": lambda logits, target: F.cross_entropy(logits.float(), target.flatten())}
    return Problem(model, F.cross_entropy, stream, judged(parts, measures, guess, chunk=_CHUNK))


def words(options: Mapping[str, Any], setting: Setting) -> Problem:
    """Build a Transformer that translates word by word, judged by the likelihood of the next word.

    Example:
        >>> sizes = {"layers": 1, "dimension": 8, "feed_forward": 8, "heads": 1, "vocabulary": 60, "max_tokens": 128}
        >>> options = WORDS | sizes | {"data": "generated", "train_pairs": 50}
        >>> problem = words(options, Setting(0, torch.device("cpu"), None))
        >>> sorted(problem.evaluate(problem.model))
        ['guess', 'test_loss', 'valid_loss']
    """
    corpus = corpus_of(options, setting)
    vocabulary = WordVocabulary(corpus.train, options["vocabulary"])
    sizes = {name: options[name] for name in ("layers", "dimension", "feed_forward", "heads", "dropout")}
    # LayerNorm first: without it, a Transformer of any depth needs a warm-up that is tuned for it.
    transformer = Transformer(vocabulary.size, **sizes, norm_first=True, padding=PAD)
    model = NextWord(transformer).to(setting.device)
    train, valid, test = (
        TextBatches(encoded(pairs, vocabulary), options["max_tokens"], setting.seed, setting.device)
        for pairs in (corpus.train, corpus.valid, corpus.test)
    )
    known, wanted = (torch.cat([target[target != PAD] for _, target in part.in_order()]) for part in (train, test))
    parts = {"valid": valid, "test": test}
    guess = _by_frequency(known, wanted, vocabulary.size)

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert isinstance(model, NextWord)
        losses = {f"{name}_loss": next_words(model, part.in_order())[0] for name, part in parts.items()}
        return {"guess": guess, **losses}

    return Problem(model, nn.CrossEntropyLoss(ignore_index=PAD), train, evaluate)


def _by_frequency(train: Tensor, test: Tensor, size: int) -> float:
    """Return the mean negative log-likelihood of a text if each symbol is as likely as it was in another text."""
    counts = torch.bincount(train, minlength=size).double() + 1
    return float(-(counts / counts.sum()).log()[test].mean())
