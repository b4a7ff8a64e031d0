"""The methods of the benchmark without tuning: one list for all tasks.

- APO around SGDm and AdamW, and around Muon where a network consists of matrices, as the library has it, and with the
  paper's settings (``-paper``); and the second-order method whose rates and dampings it learns (APO-Eigen).
- SGDm, AdamW and NadamW under a cosine with 5% of warm-up at seven rates each. One rate is the usual default; the rate
  that is best on a task's held-out data is the *tuned* one; NadamW's rate that is best over all tasks together is the
  *calibrated* one. :mod:`apo_experiments.no_tuning.scores` finds both in the records.
- Methods of others that promise to do without a rate, with the defaults and the schedule that their authors document.
"""

from __future__ import annotations

from apo_experiments.recipe import Entry

#: The rates that a cosine starts from.
RATES: dict[str, tuple[float, ...]] = {
    "SGDm": (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001),
    "AdamW": (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001),
    "NadamW": (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001),
}

#: The rate that people take who do not tune.
USUAL = {"SGDm": 0.1, "AdamW": 1e-3}

#: Decoupled weight decay of the family of Adam, torch's default for AdamW.
_DECAY = 0.01


def label_of(base: str, rate: float) -> str:
    """Return the label of a cosine.

    Example:
        >>> label_of("SGDm", 0.1)
        'SGDm-cosine-0.1'
    """
    return f"{base}-cosine-{rate:g}"


def entries(decay: float = 0.0, muon: bool = False) -> tuple[Entry, ...]:
    """Return all methods for a task.

    Args:
        decay: Weight decay (L2) of the family of SGD.
        muon: Whether the network consists of matrices.

    Example:
        >>> [entry.label for entry in entries(muon=True) if "APO" in entry.label]
        ['SGDm-APO', 'AdamW-APO', 'Muon-APO', 'APO-Eigen', 'SGDm-APO-paper', 'AdamW-APO-paper']
        >>> len(entries())
        33
    """
    sgd, adam = {"weight_decay": decay}, {"weight_decay": _DECAY}
    cosine, warm = {"schedule": "cosine"}, {"schedule": "warm-cosine"}
    methods = {"SGDm": ("sgdm", sgd), "AdamW": ("adamw", adam), "NadamW": ("nadamw", adam)}
    return (
        # First, because the first run of a process takes the time that torch needs to start.
        *(
            Entry(label_of(base, rate), method, own | warm | {"lr": rate})
            for base, (method, own) in methods.items()
            for rate in RATES[base]
        ),
        Entry("SGDm-APO", "sgdm-apo-untuned", sgd),
        Entry("AdamW-APO", "adamw-apo-untuned", adam),
        *([Entry("Muon-APO", "muon-apo-untuned", adam)] if muon else []),
        Entry("APO-Eigen", "apo-eigen", sgd),
        Entry("SGDm-APO-paper", "sgdm-apo", sgd | {"preset": "paper", "lr": 0.1}),
        Entry("AdamW-APO-paper", "adamw-apo", adam | {"preset": "paper", "lr": 3e-4}),
        Entry("Prodigy", "prodigy", adam | cosine),
        Entry("D-Adaptation", "d-adaptation", adam | cosine),
        Entry("Schedule-Free-SGD", "schedule-free-sgd-warm", sgd),
        Entry("Schedule-Free-AdamW", "schedule-free-adamw-warm", adam),
        # AdamG has a schedule of its own, and its decay is not scaled down with its steps: none, its default.
        Entry("AdamG", "adamg"),
        Entry("DoG", "dog", sgd),
        Entry("Mechanic", "mechanic", adam | warm),
    )


def base_of(label: str) -> str:
    """Return the optimizer whose tuned cosine a method of :func:`entries` is compared with: SGDm or AdamW.

    Example:
        >>> base_of("SGDm-APO"), base_of("NadamW-cosine-0.001")
        ('SGDm', 'AdamW')
    """
    return "SGDm" if label.startswith(("SGDm", "APO-Eigen", "Schedule-Free-SGD", "DoG")) else "AdamW"
