"""German to English with a Transformer (section 5.2.4, appendix B.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from apo_experiments.data import text
from apo_experiments.data.streams import TextBatches
from apo_experiments.data.vocabulary import Vocabulary
from apo_experiments.data.vocabulary import build as build_vocabulary
from apo_experiments.errors import choose, required
from apo_experiments.models.decoding import beam_search
from apo_experiments.models.transformer import Transformer
from apo_experiments.problem import Batches, Problem
from apo_experiments.recipe import Setting
from apo_experiments.tasks.evaluation import evaluating

__all__ = ["DEFAULTS", "FlatTargets", "NextWord", "corpus_of", "translation"]

#: Options: the corpus and the first so many of its training pairs; the network; ``max_tokens`` of a batch; ``beam`` 1
#: for greedy translation; how many test sentences are translated at the end of an epoch (None for all of them).
DEFAULTS: dict[str, Any] = {
    "corpus": "multi30k",
    "data": "official",
    "train_pairs": None,
    "vocabulary": 10000,
    "layers": 6,
    "dimension": 512,
    "feed_forward": 1024,
    "heads": 4,
    "dropout": 0.3,
    "label_smoothing": 0.1,
    "max_tokens": 4096,
    "beam": 5,
    "bleu_sentences": None,
}

#: Sentences that are translated at a time.
_CHUNK = 128


def translation(options: Mapping[str, Any], setting: Setting) -> Problem:
    """Build the problem.

    Metrics: ``bleu`` of the test sentences, by sacrebleu; ``valid_loss``, the mean negative log-likelihood of a piece,
    and ``valid_accuracy``, the percentage of pieces that are guessed right given those before them.

    Args:
        options: See :data:`DEFAULTS`.
        setting: The seed decides the initial weights and the order of the batches; not the vocabulary.
    """
    required("sacrebleu")  # fails now rather than after an hour
    corpus = corpus_of(options, setting)
    vocabulary = build_vocabulary(corpus.train, options["vocabulary"])
    sizes = {name: options[name] for name in ("layers", "dimension", "feed_forward", "heads", "dropout")}
    model = NextWord(Transformer(vocabulary.size, **sizes, padding=vocabulary.pad)).to(setting.device)
    train, valid = (
        TextBatches(vocabulary.encode_pairs(pairs), options["max_tokens"], setting.seed, setting.device)
        for pairs in (corpus.train, corpus.valid)
    )
    loss = nn.CrossEntropyLoss(ignore_index=vocabulary.pad, label_smoothing=options["label_smoothing"])
    judge = _Judge(valid, corpus.test[: options["bleu_sentences"]], vocabulary, options["beam"], setting.device)
    return Problem(model, loss, FlatTargets(train), judge)


@final
class NextWord(nn.Module):
    """A Transformer as a classifier of the next word: every position in a batch is an example.

    Args:
        transformer: The network.
    """

    def __init__(self, transformer: Transformer) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Map words ``[batch, source length]`` and ``[batch, length]`` to logits ``[batch * length, vocabulary]``."""
        return self.transformer(source, target).flatten(0, 1)


@final
class FlatTargets(Batches):
    """Batches whose targets ``[batch, length]`` are one long row, padding included."""

    def __init__(self, batches: TextBatches) -> None:
        self._batches = batches
        self.steps_per_epoch = batches.steps_per_epoch

    def next(self) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return the next batch."""
        inputs, target = self._batches.next()
        return inputs, target.flatten()

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position."""
        self._batches.load_state_dict(state)


@final
class _Judge:
    """Scores the next words of the validation text and translates the test text."""

    def __init__(
        self, valid: TextBatches, test: Sequence[text.Pair], vocabulary: Vocabulary, beam: int, device: torch.device
    ) -> None:
        self._valid, self._vocabulary, self._beam, self._device = valid.in_order(), vocabulary, int(beam), device
        # Sentences of similar length together: less padding, and decoding ends with the longest.
        pairs = sorted(test, key=lambda pair: len(pair[0]))
        self._sources = [vocabulary.encode(source) for source, _ in pairs]
        self._references = [target for _, target in pairs]

    def __call__(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, NextWord)
        with evaluating(model):
            correct, entropy, count = torch.stack([self._score(model, *batch) for batch in self._valid]).sum(0).tolist()
            bleu = required("sacrebleu").corpus_bleu(self._translate(model.transformer), [self._references]).score
        return {"bleu": bleu, "valid_loss": entropy / count, "valid_accuracy": 100 * correct / count}

    def _score(self, model: NextWord, inputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        """Return the number of right guesses, the sum of negative log-likelihoods and the number of pieces."""
        logits, wanted = model(*inputs).float(), target.flatten()
        counts = wanted != self._vocabulary.pad
        entropy = nn.functional.cross_entropy(logits, wanted, ignore_index=self._vocabulary.pad, reduction="sum")
        correct = ((logits.argmax(1) == wanted) & counts).sum()
        return torch.stack([correct.double(), entropy.double(), counts.sum().double()])

    def _translate(self, transformer: Transformer) -> list[str]:
        translations = []
        for start in range(0, len(self._sources), _CHUNK):
            rows = [[*source, self._vocabulary.eos] for source in self._sources[start : start + _CHUNK]]
            longest = max(map(len, rows))
            padded = [row + [self._vocabulary.pad] * (longest - len(row)) for row in rows]
            found = beam_search(
                transformer,
                torch.tensor(padded, device=self._device),
                self._vocabulary.bos,
                self._vocabulary.eos,
                max_length=min(2 * longest + 10, 500),  # the network has 512 positions
                width=self._beam,
            )
            translations += [self._vocabulary.decode(pieces) for pieces in found.tolist()]
        return translations


def corpus_of(options: Mapping[str, Any], setting: Setting) -> text.ParallelText:
    """Return the text that the options ask for."""
    if choose("data", options["data"], ("official", "generated")) == "official":
        corpus = text.load(options["corpus"], setting.data_dir)
    else:
        corpus = text.generated(train=options["train_pairs"] or 400)
    return replace(corpus, train=corpus.train[: options["train_pairs"]])
