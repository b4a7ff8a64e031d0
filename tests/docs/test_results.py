"""No table of results is typed by hand: the page and its JSON twin are what the committed records make of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from apo_experiments.no_tuning import page as no_tuning
from apo_experiments.no_tuning.archive import read as read_runs
from apo_experiments.publication import page as pages
from apo_experiments.publication.compact import path_of, read
from apo_experiments.recipes import FAMILIES, RECIPES

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
RESULTS, DOCS = ROOT / "results", ROOT / "docs"


def test_every_committed_record_loads_is_small_and_names_no_folder():
    for path in sorted(RESULTS.glob("*/*/*.json")):
        record = read(path)
        assert path == path_of(record.config, RESULTS) and record.finished
        assert record.config.recipe in RECIPES and path.stat().st_size < 200_000
        assert not re.search(r'"/|/home/|/tmp/', path.read_text()), path.name


def test_page_and_json_are_made_of_the_records():
    found = pages.sections(RESULTS)
    page = (DOCS / "results.md").read_text()
    assert pages.updated(page, found, RESULTS) == page, "run `apo publish`"
    assert (DOCS / "results.json").read_text() == pages.results_json(found), "run `apo publish`"


def test_the_page_without_tuning_is_made_of_its_records():
    records = read_runs(RESULTS)
    page = (DOCS / no_tuning.NAME).read_text()
    made = pages.replaced(page, no_tuning.markdown(records), no_tuning.BEGIN, no_tuning.END)
    assert made == page, "run `apo publish`"
    assert json.loads((DOCS / "no-tuning.json").read_text()) == no_tuning.rows(records), "run `apo publish`"
    figures = {f"{no_tuning.ASSETS}/{path.name}" for path in (DOCS / no_tuning.ASSETS).glob("*")}
    assert figures == set(re.findall(rf"\(({no_tuning.ASSETS}/[^)]+)\)", page))
    for path in RESULTS.glob("no-tuning/*/*.jsonl"):
        assert not re.search(r'"/|/home/|/tmp/', path.read_text()), path.name


def test_the_summary_comes_first_and_names_every_recipe():
    before, summary, _ = re.split("<!-- summary:[^>]*>", (DOCS / "results.md").read_text())
    assert len(before.splitlines()) < 5 and len(summary.splitlines()) < 35
    # The benchmark without tuning has its own page.
    assert not [name for name in RECIPES if f"`{name}`" not in summary and name not in FAMILIES["no-tuning"]]


def test_every_figure_is_shown_and_small():
    page = (DOCS / "results.md").read_text()
    figures = sorted((DOCS / pages.ASSETS).glob("*"))
    assert {f"{pages.ASSETS}/{path.name}" for path in figures} == set(re.findall(rf"\(({pages.ASSETS}/[^)]+)\)", page))
    assert all(path.stat().st_size < 200_000 for path in figures)


#: Methods of ResNet-32 that the README quotes, as docs/results.json has them.
README_ROWS = [("fixed", {}), ("step", {}), ("APO", {}), ("APO", {"total_steps": None})]


def test_the_readme_shows_figures_of_the_records():
    known = {
        (row["row"], row["method"], str(row["settings"])): row
        for row in json.loads((DOCS / "results.json").read_text())
    }
    text = (ROOT / "README.md").read_text()
    for method, settings in README_ROWS:
        row = known["cifar10-resnet32-rate", f"SGDm-{method}", str(settings)]
        spread = "" if row["spread"] is None else f" ± {row['spread']:.2f}"
        assert f"{row['mean']:.2f}{spread}%" in text, method
