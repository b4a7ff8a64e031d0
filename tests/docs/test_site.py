"""The documentation's site builds without a warning, needs nothing from elsewhere, and knows every public name."""

from __future__ import annotations

import html
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType

import pytest
from tests import browser

from apo_experiments.recipes import RECIPES

pytestmark = [pytest.mark.docs, pytest.mark.slow]
pytest.importorskip("mkdocs", reason="the extra docs is not installed")

ROOT = Path(__file__).parents[2]


def build(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Builds the project's site as `make docs` does, where a connection to anywhere would fail."""
    # A port on which nobody listens: whatever asks for a page of the web gets an error.
    nowhere = dict.fromkeys(["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"], "http://127.0.0.1:9")
    environment = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(project / "src")}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.fixture
def copy(tmp_path) -> Path:
    """Returns a copy of what a build reads, to be broken."""
    project = tmp_path / "project"
    for name in ["docs", "src", "examples", "benchmarks", "tests"]:
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ["mkdocs.yml", "README.md"]:
        shutil.copy(ROOT / name, project / name)
    return project


def documented(site: Path) -> set[str]:
    """Reads the names in the site's inventory, a format of Sphinx, and those that a page describes in its own words."""
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]  # four lines, then compressed ones
    found = {line.split(" ")[0] for line in zlib.decompress(packed).decode().splitlines()}
    for page in (site / "api").glob("*.html"):
        found |= set(re.findall(r'<h\d id="(apo\.[\w.]+)"', page.read_text()))
    return found


MODULES = ["apo", "apo.rules", "apo.discrepancy", "apo.preconditioners"]
MODULES += ["apo.reference", "apo.reference.methods", "apo.reference.updates"]
MODULES += [f"apo.integrations.{name}" for name in ["accelerate", "distributed", "lightning", "transformers"]]


def public_names(module: ModuleType) -> list[str]:
    """Returns the names that a module exports, or else the functions that it defines."""
    functions = inspect.getmembers(module, inspect.isfunction)
    own = [name for name, item in functions if item.__module__ == module.__name__ and not name.startswith("_")]
    return getattr(module, "__all__", own)


@pytest.mark.parametrize("module_name", MODULES)
def test_every_public_name_is_in_the_api_reference(site, module_name):
    module = importlib.import_module(module_name)
    known = documented(site)
    # A function may hide the module that defines it, as `apo.attach` does: then its path there counts.
    hidden = {name for name in public_names(module) if f"{module_name}.{name}.{name}" in known}
    missing = [name for name in public_names(module) if f"{module_name}.{name}" not in known and name not in hidden]
    assert public_names(module) and not missing


def test_pages_ask_nothing_of_other_hosts(site):
    # Links may lead elsewhere; what a browser loads by itself may not.
    loads = re.compile(
        r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^>]*>|<link\b(?![^>]*canonical)[^>]*//[^>]*>"""
    )
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))  # those that show files, and the one for errors
    assert not [(page.name, found) for page in pages for found in loads.findall(page.read_text())]
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import\s)[\"']?(?:https?:)?//", style.read_text()), style.name


def test_a_browser_shows_all_of_every_table_at_every_width_and_dark_figures_on_dark_pages(site, tmp_path):
    pages = [str(path.relative_to(site)) for path in sorted(site.rglob("*.html")) if "source" not in path.parts]
    shown = browser.measure(site, pages, tmp_path / "light")
    assert {(page["page"], page["width"]) for page in shown} == {(page, w) for page in pages for w in browser.WIDTHS}
    assert sum(len(page["tables"]) for page in shown) > 100
    for page in shown:
        assert page["content"] <= page["window"] == page["width"], page
        assert "is cut off" not in page["tables"], page
        is_wide = page["page"] == "no-tuning.html"  # it has a column for each of its tasks
        assert page["width"] < 1400 or is_wide or "scrolls" not in page["tables"], page
        assert page["filter"] in (None, "none"), page
    for page in browser.measure(site, ["index.html", "results.html"], tmp_path / "dark", dark=True):
        assert page["filter"].startswith("invert"), page


def test_search_engines_find_every_page_and_readers_the_paper(site):
    address = re.search(r'^site_url: .*"(.*)"', (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert address is not None
    listed = set(re.findall(r"<loc>(.*?)</loc>", (site / "sitemap.xml").read_text()))
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    assert listed >= {address[1] + str(path.relative_to(site)) for path in pages}
    paper = re.search(r"^Paper = \"(.*)\"$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert paper is not None and f'href="{paper[1]}"' in (site / "index.html").read_text()


def test_formulas_are_mathml_and_none_is_left_as_latex(site):
    theory = (site / "theory.html").read_text()
    assert theory.count("<math") > 30 and 'display="block"' in theory
    assert "<math" in (site / "api" / "preconditioners.html").read_text()
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert "arithmatex" not in text, page.name
        assert not re.search(r">[^<]*\\[^<]*</m[iotn]", text), page.name


def test_no_markup_of_docstrings_is_left_over(site):
    for page in (site / "api").glob("*.html"):
        prose = re.sub(r"<pre.*?</pre>", "", html.unescape(page.read_text()), flags=re.DOTALL)
        assert not re.findall(r":(?:math|class|func|meth|mod|attr):|\.\. math::|={6,}", prose), page.name


def test_pages_show_what_is_written_elsewhere(site):
    experiments = (site / "experiments.html").read_text()
    assert all(f"<code>{name}</code>" in experiments for name in RECIPES)
    results = (site / "results.html").read_text()
    assert "cnn/lr-k10" in results and "HELD: " in (site / "demo.html").read_text()
    assert "class LayerwiseRate" in re.sub(r"<[^>]+>", "", (site / "source/examples/custom_rule.py.html").read_text())


# What is put at the end of which file, and the part of a warning that must come of it.
DEFECTS = {
    "a page that is not there": ("index.md", "[x](nowhere.md)", "a link 'nowhere.md'"),
    "a heading that is not there": ("index.md", "[x](theory.md#nowhere)", "does not contain an anchor '#nowhere'"),
    "a file that is not there": ("index.md", "[x](../examples/nowhere.py)", "a link '../examples/nowhere.py'"),
    "a formula that cannot be read": ("theory.md", "$\\nosuchcommand x$", "unknown command in \\nosuchcommand"),
    "a page that no menu leads to": ("lost.md", "# Lost", "  - lost.md"),
    "a name of no documented object": ("theory.md", "[x][apo.Nowhere]", "target 'apo.Nowhere'"),
}
FATAL = {
    "a public name that is not there": (
        "api/rules.md",
        "::: apo.rules.Nowhere",
        "apo.rules.Nowhere could not be found",
    ),
    "an insert that is unknown": ("results.md", "<!-- insert: nowhere -->", "got 'nowhere'"),
}


def spoil(project: Path, file: str, text: str) -> None:
    with (project / "docs" / file).open("a") as page:
        page.write(f"\n{text}\n")


def test_broken_links_formulas_and_references_fail_the_build(copy, tmp_path):
    for file, text, _ in DEFECTS.values():
        spoil(copy, file, text)
    module = copy / "src" / "apo" / "core" / "objective.py"
    module.write_text(module.read_text().replace('r"""', 'r"""See :class:`Elsewhere`. ', 1))
    done = build(copy, tmp_path / "site")
    complaints = {defect: complaint for defect, (_, _, complaint) in DEFECTS.items()}
    complaints["a docstring that refers to nothing"] = "apo.core.objective: there is no 'Elsewhere'"
    assert done.returncode != 0
    assert not [defect for defect, complaint in complaints.items() if complaint not in done.stderr], done.stderr


@pytest.mark.parametrize("defect", FATAL)
def test_the_build_stops_at(defect, copy, tmp_path):
    file, text, complaint = FATAL[defect]
    spoil(copy, file, text)
    done = build(copy, tmp_path / "site")
    assert done.returncode != 0 and complaint in done.stderr
