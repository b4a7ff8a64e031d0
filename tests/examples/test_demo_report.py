"""The demo tells the truth about its runs, whichever way they went."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _examples_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def runs(fixed: dict[float, tuple[float, float]], tuned: tuple[float, float], seeds: int = 1) -> list:
    """Returns runs of the demo's kinds: fixed rates with their final (loss, accuracy), and one outcome of APO."""
    training = importlib.import_module("demo_training")
    made = []
    for optimizer in training.OPTIMIZERS:
        for rate, outcome in fixed.items():
            for learned, (loss, accuracy) in ((False, outcome), (True, tuned)):
                for seed in range(seeds):
                    job = training.Job(optimizer, rate, learned, seed, 1)
                    made.append(training.Run(job, [2.3, loss], accuracy, [0], [0.05] if learned else []))
    job = training.Job(training.PRECONDITIONED, 1.0, True, 0, 1)
    return [*made, training.Run(job, [2.3, 0.001], 99.0, [0], [1.0])]


FIXED = {1e-6: (2.29, 11.0), 1e-3: (1.2, 80.0), 1e-1: (0.01, 97.0), 1e2: (math.nan, 10.0), 1e3: (900.0, 10.0)}


def report(*args, **options) -> str:
    return importlib.import_module("demo_report").report(runs(*args, **options))


def test_good_outcome_is_reported_as_held():
    text = report(FIXED, (0.02, 96.0))
    assert text.count("  HELD: ") == 4 and "DID NOT HOLD" not in text


@pytest.mark.parametrize("tuned, failing", [((0.02, 94.9), "within 2 points"), ((2.4, 96.0), "lower training loss")])
def test_bad_outcome_is_reported_as_not_held(tuned, failing):
    lines = [line for line in report(FIXED, tuned).splitlines() if "DID NOT HOLD" in line]
    assert len(lines) == 2 and all(failing in line for line in lines)


def test_a_run_of_apo_that_ends_without_a_loss_fails_the_claim():
    assert report(FIXED, (math.nan, 10.0)).count("DID NOT HOLD") == 4


def test_each_way_for_a_fixed_rate_to_fail_has_its_word():
    rows = {line.split("|")[0].strip(): line.split("|")[1] for line in report(FIXED, (0.02, 96.0)).splitlines()[7:12]}
    assert "did not learn" in rows["1e-06"] and "17.0 points short" in rows["1e-03"] and "good" in rows["1e-01"]
    assert "diverged" in rows["1e+02"] and "NaN" in rows["1e+02"] and "diverged" in rows["1e+03"]


def test_the_average_over_seeds_is_infinite_if_one_of_them_diverged():
    module = importlib.import_module("demo_report")
    made = runs({1e-1: (0.01, 97.0)}, (0.02, 96.0), seeds=2)
    made[0].losses[-1] = math.nan
    (summary,) = module.summaries(made, made[0].job.optimizer, tuned=False)
    assert summary.loss == math.inf


def test_a_run_that_was_broken_off_counts_as_diverged():
    module = importlib.import_module("demo_report")
    made = runs({1e-1: (0.01, 97.0)}, (0.02, 96.0), seeds=2)
    made[0].losses.pop()
    (summary,) = module.summaries(made, made[0].job.optimizer, tuned=False)
    assert module.verdict(summary, 97.0) == "diverged"


def test_block_of_the_page_is_replaced_and_the_rest_is_kept(tmp_path):
    module = importlib.import_module("demo_report")
    page = tmp_path / "demo.md"
    page.write_text(f"before\n{module.PAGE_BEGIN}\nold\n{module.PAGE_END}\nafter\n")
    module.write_page(page, "new")
    assert page.read_text() == f"before\n{module.PAGE_BEGIN}\n```text\nnew\n```\n{module.PAGE_END}\nafter\n"
