"""The project's address is defined once, in pyproject.toml, and whatever else names it says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def urls() -> dict[str, str]:
    block = re.search(r"^\[project\.urls\]\n((?:\w+ = \".*\"\n)+)", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert block is not None, "pyproject.toml has no [project.urls]"
    return dict(re.findall(r"^(\w+) = \"(.*)\"$", block[1], re.MULTILINE))


needs_address = pytest.mark.skipif("Repository" not in urls(), reason="the project has no public address yet")


@needs_address
@pytest.mark.parametrize(("name", "key"), [("url", "Documentation"), ("repository-code", "Repository")])
def test_the_address_is_the_same_everywhere(name, key):
    assert f"\n{name}: {urls()[key]}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_readmes_pictures_are_there():
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", (ROOT / "README.md").read_text())
    raw = urls().get("Repository", "").replace("https://github.com/", "https://raw.githubusercontent.com/") + "/main/"
    assert pictures and all((ROOT / picture.removeprefix(raw)).is_file() for picture in pictures)
    if "Repository" in urls():  # then they can also be shown where only the README is
        assert all(picture.startswith(raw) for picture in pictures)


def test_readme_and_citation_name_the_paper():
    for file in ("README.md", "CITATION.cff", "docs/index.md"):
        assert urls()["Paper"] in (ROOT / file).read_text(), file
