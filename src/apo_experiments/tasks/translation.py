"""German to English with a Transformer (section 5.2.4, appendix B.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from apo_experiments.data import text
from apo_experiments.data.streams import TextBatch, TextBatches, padded
from apo_experiments.data.vocabulary import BOS, EOS, PAD, encoded
from apo_experiments.data.vocabulary import build as build_vocabulary
from apo_experiments.errors import choose, required
from apo_experiments.models.transformer import Transformer, beam_search
from apo_experiments.problem import Problem
from apo_experiments.recipe import Setting
from apo_experiments.tasks.evaluation import evaluating

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
    model = NextWord(Transformer(vocabulary.size, **sizes, padding=PAD)).to(setting.device)
    train, valid = (
        TextBatches(encoded(pairs, vocabulary), options["max_tokens"], setting.seed, setting.device)
        for pairs in (corpus.train, corpus.valid)
    )
    loss = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=options["label_smoothing"])
    # Sentences of similar length together: less padding, and decoding ends with the longest.
    test = sorted(corpus.test[: options["bleu_sentences"]], key=lambda pair: len(pair[0]))
    sources, references = [vocabulary.encode(source) for source, _ in test], [target for _, target in test]

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert isinstance(model, NextWord)
        entropy, right = next_words(model, valid.in_order())
        translations = []
        with evaluating(model):
            for start in range(0, len(sources), _CHUNK):
                some = padded([[*source, EOS] for source in sources[start : start + _CHUNK]]).to(setting.device)
                most = min(2 * some.shape[1] + 10, 500)  # the network has 512 positions
                found = beam_search(model.transformer, some, BOS, EOS, max_length=most, width=int(options["beam"]))
                translations += [vocabulary.decode(pieces) for pieces in found.tolist()]
        bleu = required("sacrebleu").corpus_bleu(translations, [references]).score
        return {"bleu": bleu, "valid_loss": entropy, "valid_accuracy": right}

    return Problem(model, loss, train, evaluate)


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


def next_words(model: NextWord, batches: Sequence[TextBatch]) -> tuple[float, float]:
    """Return the mean negative log-likelihood of a word, given those before it, and the percentage guessed right."""

    def score(inputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        logits, counts = model(*inputs).float(), target != PAD
        entropy = nn.functional.cross_entropy(logits, target, ignore_index=PAD, reduction="sum")
        correct = ((logits.argmax(1) == target) & counts).sum()
        return torch.stack([entropy.double(), correct.double(), counts.sum().double()])

    with evaluating(model):
        entropy, correct, count = torch.stack([score(*batch) for batch in batches]).sum(0).tolist()
    return entropy / count, 100 * correct / count


def corpus_of(options: Mapping[str, Any], setting: Setting) -> text.ParallelText:
    """Return the text that the options ask for."""
    if choose("data", options["data"], ("official", "generated")) == "official":
        corpus = text.load(options["corpus"], setting.data_dir)
    else:
        corpus = text.generated(train=options["train_pairs"] or 400)
    return replace(corpus, train=corpus.train[: options["train_pairs"]])
