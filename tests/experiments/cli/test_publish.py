"""From a sweep to its best settings, from finished runs to compact records, and from those to the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.experiments.cli import registry

# no_tuning: `apo publish` needs it, and cannot import it once the small recipes stand in for the real ones.
from apo_experiments import no_tuning, records  # noqa: F401
from apo_experiments.methods import METHODS
from apo_experiments.publication import compact
from apo_experiments.publication.compact import LIMIT, path_of
from apo_experiments.publication.page import BEGIN, END
from apo_experiments.records import Record
from apo_experiments.runs import RunConfig

WORDS = ("little-mlp", "--scale", "paper", "--set", "data=generated")


@pytest.fixture
def argv(monkeypatch):
    """Let records say that a command came from a command line of its own."""

    def command(*words: str) -> tuple[str, ...]:
        monkeypatch.setattr("sys.argv", ["__main__.py", *words])
        return words

    return command


@pytest.fixture
def page() -> Path:
    path = Path("docs/results.md")
    path.parent.mkdir()
    path.write_text(f"# Results\n\n{BEGIN}\nold\n{END}\n\nThe end.\n")
    return path


@pytest.mark.slow
def test_best_trains_the_settings_that_the_sweep_found_and_its_records_say_so(apo, argv, page):
    assert apo(*argv("sweep", *WORDS, "--method", "SGD", "--grid", "lr=0.01,0.3")).code == 0
    tried = {r.config.hyper["lr"]: r.summary["metrics"]["test_loss"] for r in records.find(Path("runs"))}
    assert set(tried) == {0.01, 0.3}
    best = min(tried, key=lambda rate: tried[rate])
    assert apo(*argv("run", *WORDS, "--method", "SGD", "--seeds", "2", "--best")).code == 0
    (final,) = [r for r in records.find(Path("runs")) if r.header.get("chosen_by") and r.config.seed == 1]
    assert final.config.hyper["lr"] == best
    assert {key: final.header["chosen_by"][key] for key in ("hyper", "points", "epochs")} == {
        "hyper": {"lr": best},
        "points": 2,
        "epochs": 4,
    }
    assert apo(*argv("run", *WORDS, "--method", "SGD", "--seeds", "1")).code == 0  # the recipe's own setting
    assert apo("publish", "--runs", "runs").code == 0
    (chosen, other) = json.loads((page.parent / "results.json").read_text())
    assert (chosen["settings"], chosen["seeds"], other["settings"]) == ({}, 2, {"lr": 0.2})
    tuning = Path("results/little-mlp/paper/tuning.jsonl").read_text().splitlines()
    assert len(tuning) == 2 and f"`lr={best:g}` (2 points, 4 epochs" in page.read_text()
    refused = apo("run", *WORDS, "--method", "SGD-APO", "--best")
    assert refused.code == 2 and "--method SGD-APO` first" in refused.err


def test_records_table_rows_and_figure_come_of_the_runs_and_twice_is_once(apo, argv, page):
    data = ("--data-dir", "/some/where", "--epochs", "4")
    assert apo(*argv("run", *WORDS, "--seeds", "2", *data)).code == 0
    assert apo(*argv("run", *WORDS, "--epochs", "1", "--seeds", "1")).code == 0  # a shorter one, which is no result
    assert apo("publish").code == 0
    before = {path: path.read_bytes() for folder in ("results", "docs") for path in Path(folder).rglob("*.*")}
    assert apo("publish").code == 0
    assert before == {path: path.read_bytes() for folder in ("results", "docs") for path in Path(folder).rglob("*.*")}
    runs = {(r.config.label, r.config.seed): r for r in records.find(Path("runs")) if r.config.epochs == 4}
    for record in compact.find(Path("results")):
        own = runs.pop((record.config.label, record.config.seed))
        assert record.config.identity() == own.config.identity()
        assert [row["train_loss"] for row in record.rows] == pytest.approx(
            [row["train_loss"] for row in own.rows], rel=1e-4
        )
        assert record.header["command"] == ["apo", "run", *WORDS, "--seeds", "2", "--epochs", "4"]
    assert not runs
    text = page.read_text()
    assert "old" not in text and text.endswith(f"{END}\n\nThe end.\n")
    assert "apo run little-mlp --scale paper --set data=generated --seeds 2 --epochs 4\n" in text
    assert (page.parent / "assets/results/little-mlp-paper.png").stat().st_size < 200_000
    assert "Not the paper's setting, whose figures stand in brackets: data generated (paper: official)." in text
    assert "| SGD-APO † |" in text and "† Not the paper's method: SGD-APO with the library's settings." in text
    (sgd, _) = json.loads((page.parent / "results.json").read_text())
    assert {"table": "Table 7", "row": "little-mlp", "method": "SGD", "paper": 0.5, "seeds": 2}.items() <= sgd.items()
    assert f"| `little-mlp` | SGD | test loss | (0.5000) | {sgd['mean']:#.4g} |" in text


def test_a_setting_that_is_newer_than_a_record_makes_no_second_row(apo, argv, page):
    assert apo(*argv("run", *WORDS, "--seeds", "1")).code == 0 and apo("publish").code == 0
    before = json.loads((page.parent / "results.json").read_text())
    known = sorted(Path("results").rglob("*.json"))
    sgd = registry.METHODS["sgd"]
    newer = replace(sgd, defaults={**sgd.defaults, "neutral": 0.0})
    METHODS["sgd"] = newer
    assert apo(*argv("run", *WORDS, "--seeds", "2")).code == 0  # seed 0 again, in another folder, and seed 1
    done = apo("publish")
    assert "little-mlp: 5 runs (3 there already, kept)" in done.out
    assert set(known) < set(Path("results").rglob("*.json")) and len(list(Path("results").rglob("*.json"))) == 4
    after = json.loads((page.parent / "results.json").read_text())
    assert [(row["method"], row["settings"], row["seeds"]) for row in after] == [
        (row["method"], row["settings"], 2) for row in before
    ]


def test_committed_records_stay(apo, argv, page):
    assert apo(*argv("run", *WORDS, "--seeds", "1")).code == 0 and apo("publish").code == 0
    path = next(Path("results").rglob("*.json"))
    path.write_text(path.read_text().replace('"hardware": {', '"hardware": {"note": "committed", '))
    done = apo("publish")
    assert done.code == 0 and "there already, kept" in done.out and '"note": "committed"' in path.read_text()


def test_outside_a_clone_it_refuses_or_says_what_it_left_out(apo, argv):
    assert apo(*argv("run", *WORDS, "--seeds", "1")).code == 0
    refused = apo("publish")
    assert refused.code == 2 and "There is no docs/results.md here: run it in a clone" in refused.err
    assert not Path("results").exists()
    done = apo("publish", "--to", "compact")
    assert done.code == 0 and "There is no docs/results.md, so only compact was written" in done.out
    assert list(Path("compact").rglob("*.json")) and not Path("docs").exists()


def test_without_records_the_page_says_so(apo, page):
    done = apo("publish")
    assert done.code == 0 and "There is nothing new to publish: runs has no finished runs of scale paper" in done.out
    elsewhere = apo("publish", "--to", "compact", "--docs", "elsewhere")
    assert elsewhere.code == 0 and "There is no elsewhere/results.md, so no page was written" in elsewhere.out
    assert "compact was written" not in elsewhere.out and not Path("compact").exists()
    assert "No records of such runs are committed yet." in page.read_text()
    assert json.loads((page.parent / "results.json").read_text()) == []


def test_a_page_without_a_place_for_tables_is_one_sentence(apo, page):
    page.write_text("# Results\n")
    done = apo("publish")
    assert done.code == 2 and "no place for the tables" in done.err and page.read_text() == "# Results\n"


def test_a_long_curve_is_thinned_out_and_keeps_its_end(tmp_path):
    rows = [{"kind": "row", "step": step, "x": [step / 7] * 10} for step in range(1, 5001)]
    record = Record(RunConfig("r", "SGD", "sgd", "paper", 0, 1), {}, rows, {"metrics": {}})
    path = compact.write(record, tmp_path)
    assert path == path_of(record.config, tmp_path) and path.stat().st_size <= LIMIT
    kept = compact.read(path).rows
    assert kept[-1]["step"] == 5000 and len(kept) > 500
