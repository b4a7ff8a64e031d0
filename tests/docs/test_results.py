"""No table of results is typed by hand: the page and its JSON twin are what the committed records make of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from apo_experiments.publication import page as pages
from apo_experiments.publication.compact import path_of, read
from apo_experiments.recipes import RECIPES

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
    assert pages.replaced(page, pages.markdown(found, RESULTS)) == page, "run `apo publish`"
    assert (DOCS / "results.json").read_text() == pages.results_json(found), "run `apo publish`"


def test_every_figure_is_shown_and_small():
    page = (DOCS / "results.md").read_text()
    figures = sorted((DOCS / pages.ASSETS).glob("*"))
    assert {f"{pages.ASSETS}/{path.name}" for path in figures} == set(re.findall(rf"\(({pages.ASSETS}/[^)]+)\)", page))
    assert all(path.stat().st_size < 200_000 for path in figures)
