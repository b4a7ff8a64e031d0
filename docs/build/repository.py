"""Bring what lies outside the documentation's folder into the site.

- A link to a file of the repository, ``[text](../examples/one_line.py)``, leads to a page that shows the file.
- ``<!-- insert: NAME -->`` stands for text that is written elsewhere; ``INSERTS`` says where.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

__all__ = ["on_files", "on_page_markdown"]

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(\.\./(?P<path>[\w./-]+)\)")
INSERT = re.compile(r"^<!-- insert: (?P<name>[\w-]+) -->$", re.MULTILINE)
LANGUAGES = {".py": "python", ".md": "markdown", ".toml": "toml", ".yml": "yaml", ".sh": "bash"}


def on_files(files: Files, config, **_) -> Files:
    """Add a page for every file of the repository that some page links to (a hook of mkdocs)."""
    pages = [file.content_string for file in files.documentation_pages() if "/" not in file.src_uri]
    for path in sorted({match["path"] for text in pages for match in LINK.finditer(text)}):
        if (ROOT / path).is_file():
            page = File.generated(config, f"source/{path}.md", content=_shown(path))
            page.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(page)
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    """Point the links at those pages and put the inserts in (a hook of mkdocs)."""
    if "/" in page.file.src_uri:
        return markdown

    def link(match: re.Match[str]) -> str:
        # A link that leads nowhere is left alone: mkdocs complains about it.
        return f"](source/{match['path']}.md)" if (ROOT / match["path"]).is_file() else match[0]

    return INSERT.sub(_insert, LINK.sub(link, markdown))


def _shown(path: str) -> str:
    file = ROOT / path
    return f"# {path}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text().rstrip()}\n````\n"


def _insert(match: re.Match[str]) -> str:
    if match["name"] not in INSERTS:
        raise PluginError(f"insert must be one of {', '.join(INSERTS)}, got {match['name']!r}")
    return INSERTS[match["name"]]()


def _between(path: str, begin: str, end: str) -> str:
    """Return what stands in a file between two comments, which its own scripts keep up to date."""
    text = (ROOT / path).read_text()
    found = re.search(rf"<!-- {begin}.*?-->(.*?)<!-- {end} -->", text, re.DOTALL)
    if found is None:
        raise PluginError(f"{path} has no part between the comments {begin!r} and {end!r}")
    return found[1].strip()


def _recipes() -> str:
    from apo_experiments.recipe import SCALES
    from apo_experiments.recipes import RECIPES

    rows = [["Recipe", "Repeats", *SCALES, "Data", "What it shows"], ["---", "---", "--:", "--:", "--:", "---", "---"]]
    for recipe in RECIPES.values():
        minutes = [f"{recipe.scales[name].minutes:g}" if name in recipe.scales else "" for name in SCALES]
        rows.append([f"`{recipe.name}`", recipe.paper, *minutes, ", ".join(recipe.data) or "none", recipe.title])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


INSERTS: dict[str, Callable[[], str]] = {
    "overhead": lambda: _between("benchmarks/README.md", "overhead cpu: begin", "overhead cpu: end"),
    "overhead-cuda": lambda: _between("benchmarks/README.md", "overhead cuda: begin", "overhead cuda: end"),
    "recipes": _recipes,
}
