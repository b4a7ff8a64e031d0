"""German to English with a Transformer (Table 2, last row).

The paper's claim: with a fixed rate after its warm-up, APO-Precond reaches the BLEU score of AdamW with its usual
schedule, and SGDm stays behind. Six encoder and six decoder layers, 512 dimensions, feed-forward 1,024, four heads,
dropout 0.3, weight decay 1e-4; embeddings get a diagonal block, and Adam warms up.

The paper's data are IWSLT'14 (``--set corpus=iwslt14``, where the files are given); by default Multi30k, whose BLEU
cannot be compared with the paper's, so that the paper's figures stand beside the recipe ``translation-iwslt14``.
AdamW's epsilon of 1e-1 in the paper's appendix is probably a misprint; we use 1e-8.

Scales: smoke translates a toy language, in seconds; cpu trains a small network on 4,000 captions, in minutes; paper is
the paper's own network, hours on one GPU.
"""

from __future__ import annotations

from dataclasses import replace

from apo_experiments.recipe import Entry, Recipe, Scale, by_name
from apo_experiments.recipes import grids
from apo_experiments.tasks.translation import DEFAULTS, translation

_SCHEDULE = {"weight_decay": 1e-4, "schedule": "inverse-sqrt", "schedule_warmup": 4000}
_APO = {"lr": 1.0, "fsd_weight": 0.1, "wsd_weight": 0.3, "weight_decay": 1e-4, "meta_lr": 3e-4}
_WARMUP = {"warmup": "adam", "warmup_lr": 3e-4, "warmup_interval": 1}
_ENTRIES = (
    # Of the paper's two schedules the one with a warm-up. At scale cpu, 0.3 from the first step on diverges in the
    # first epoch; with the warm-up two seeds end at BLEU 7.9 and 4.9, and fixed rates of 0.1 and 0.03 at 4.7 and 2.1.
    Entry("SGDm", "sgdm", {"lr": 0.3, **_SCHEDULE}, grids.SGDM_TRANSLATION),
    Entry("AdamW", "adamw", {"lr": 5e-4, "betas": (0.9, 0.98), **_SCHEDULE}, grids.ADAMW_TRANSLATION),
    Entry("APO-Precond", "apo-precond", {**_APO, **_WARMUP}, grids.APO_PLAIN),
)

#: Table 2.
_PAPER = {"SGDm": 31.43, "AdamW": 34.60, "APO-Precond": 34.62}

SMOKE = {
    **{"data": "generated", "train_pairs": 64, "vocabulary": 60, "layers": 1, "dimension": 16, "feed_forward": 16},
    **{"heads": 2, "max_tokens": 128, "beam": 1, "bleu_sentences": 8},
}
_CPU = {
    **{"train_pairs": 4000, "vocabulary": 2000, "layers": 2, "dimension": 128, "feed_forward": 256, "dropout": 0.1},
    **{"max_tokens": 1024, "beam": 1, "bleu_sentences": 200},
}
_CPU_HYPER = {
    "SGDm": {"schedule_warmup": 200},
    "AdamW": {"lr": 2e-3, "schedule_warmup": 200},
    "APO-Precond": {"meta_lr": 1e-3, "warmup_lr": 1e-3},
}


def _recipe(name: str, corpus: str, title: str, entries: tuple[Entry, ...], epochs: int, minutes: float) -> Recipe:
    return Recipe(
        name=name,
        title=f"German to English ({title}) with a Transformer",
        paper="Table 2",
        task=translation,
        defaults=DEFAULTS | {"corpus": corpus},
        data=(corpus,),
        scales={
            "smoke": Scale(2, 1, 0.1, SMOKE, grids.smoke_hyper(entries)),
            "cpu": Scale(6, 1, 10, _CPU, _CPU_HYPER),
            "paper": Scale(epochs, 1, minutes),
        },
        entries=entries,
        metric="bleu",
        goal="max",
        notes="APO-Precond with a fixed rate reaches the BLEU score of AdamW with a schedule; SGDm stays behind.",
    )


_WITH_PAPER = tuple(replace(entry, paper=_PAPER[entry.label]) for entry in _ENTRIES)

RECIPES = by_name(
    _recipe("translation", "multi30k", "Multi30k", _ENTRIES, 60, 90),
    _recipe("translation-iwslt14", "iwslt14", "IWSLT'14", _WITH_PAPER, 55, 400),
)
