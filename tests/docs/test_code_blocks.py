"""Every Python block of the documentation runs, in order, page by page.

Blocks fenced as ```python run in one namespace per page and in an empty folder; ```python notest is shown only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)(?P<target>[^)#\s]+)")


def python_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line number and the source of every block that shall run."""
    for match in FENCE.finditer(text):
        if match["info"].strip() == "python":
            yield text.count("\n", 0, match.start("body")), match["body"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_on_the_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    for line, source in python_blocks(page.read_text()):
        # Newlines in front make a traceback show the line of the page.
        exec(compile("\n" * line + source, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    missing = [m["target"] for m in LINK.finditer(page.read_text()) if not (page.parent / m["target"]).exists()]
    assert not missing


def test_at_most_one_block_in_all_is_exempt_from_running():
    assert sum(page.read_text().count("```python notest") for page in PAGES) <= 1


def test_readme_is_short_and_passes_total_steps():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 80
    assert "apo.attach(optimizer, model, criterion, total_steps=" in readme


def test_demo_is_shown_as_printed():
    page = (ROOT / "docs" / "demo.md").read_text()
    shown = page.split("<!-- demo:begin")[1].split("<!-- demo:end -->")[0]
    assert shown.count("  HELD: ") == 4 and "DID NOT HOLD" not in shown


def test_extractor_finds_the_blocks_to_run_and_their_lines():
    text = "a\n```python\nx = 1\n```\n```text\nno\n```\n```python notest\nno\n```\n\n```python\ny = x\n```\n"
    assert list(python_blocks(text)) == [(2, "x = 1\n"), (12, "y = x\n")]
