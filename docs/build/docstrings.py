"""Read the reStructuredText of docstrings as Markdown: formulas, references and simple tables.

The docstrings are written for ``help()`` and for Sphinx alike; this extension of griffe gives mkdocstrings what it can
render. A reference to a name that does not exist is a warning, which fails the strict build.
"""

from __future__ import annotations

import logging
import re
import textwrap

import griffe

__all__ = ["RestructuredDocstrings"]

log = logging.getLogger("mkdocs.hooks.docstrings")

MATH_ROLE = re.compile(r":math:`([^`]+)`")
MATH_BLOCK = re.compile(
    r"^(?P<indent> *)\.\. math::(?P<first>.*)\n(?P<rest>(?:(?P=indent) +\S.*(?:\n|\Z))*)", re.MULTILINE
)
# The indented text that follows is code in Markdown too.
LITERAL = re.compile(r"(?<=\w)::$", re.MULTILINE)
# Griffe knows the plural alone.
EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
REFERENCE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`(?P<short>~?)(?P<name>[\w.]+)`")
RULER = r"=+(?:  +=+)+"
TABLE = re.compile(
    rf"^(?P<indent> *)(?P<ruler>{RULER})\n(?P<head>.+)\n(?P=indent){RULER}\n(?P<body>(?:.+\n)+?)(?P=indent){RULER}$",
    re.MULTILINE,
)


class RestructuredDocstrings(griffe.Extension):
    """Rewrites every docstring of a package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        """Start at the package (called by griffe)."""
        self._visit(pkg)

    def _visit(self, scope: griffe.Object) -> None:
        if scope.docstring is not None:
            scope.docstring.value = to_markdown(scope.docstring.value, scope)
        for member in scope.members.values():
            if not member.is_alias:
                self._visit(member)


def to_markdown(text: str, scope: griffe.Object) -> str:
    """Translate a docstring of the object ``scope``, in which the names that it mentions are looked up."""
    # Tables first: what comes after them changes the widths of their columns.
    text = TABLE.sub(_table, text)
    text = EXAMPLE.sub(r"\1Examples:", text)
    text = MATH_BLOCK.sub(_math_block, text)
    text = MATH_ROLE.sub(lambda match: "$" + " ".join(match[1].split()) + "$", text)
    text = LITERAL.sub(":", text)
    return REFERENCE.sub(lambda match: _reference(match, scope), text)


def _math_block(match: re.Match[str]) -> str:
    formula = textwrap.dedent(match["first"].strip() + "\n" + textwrap.dedent(match["rest"])).strip()
    return textwrap.indent(f"$$\n{formula}\n$$\n", match["indent"])


def _table(match: re.Match[str]) -> str:
    starts = [column.start() for column in re.finditer(r"=+", match["ruler"])]
    ends = [*starts[1:], None]
    lines = [match["head"], *match["body"].splitlines()]
    rows = [
        [line[len(match["indent"]) :][start:end].strip() for start, end in zip(starts, ends, strict=True)]
        for line in lines
    ]
    rows.insert(1, ["---"] * len(starts))
    return "\n".join(f"{match['indent']}| {' | '.join(row)} |" for row in rows)


def _reference(match: re.Match[str], scope: griffe.Object) -> str:
    name = match["name"]
    shown = f"<code>{name.rpartition('.')[2] if match['short'] else name}</code>"
    if name.partition(".")[0] == "torch":
        return shown
    path = find(name, scope)
    if path is None:
        log.warning("%s: there is no %r to refer to", scope.path, name)
        return shown
    # Optional: what is not public exists but is on no page.
    return f'<autoref optional identifier="{path}">{shown}</autoref>'


def find(name: str, scope: griffe.Object) -> str | None:
    """Return the full path of what ``name`` means in ``scope``: its members, then those of what is around it."""
    first, *rest = name.split(".")
    place: griffe.Object | None = scope
    while place is not None:
        if first in place.all_members:
            return _follow(place.all_members[first], rest)
        if place.parent is None and place.name == first:
            return _follow(place, rest)
        place = place.parent
    return None


def _follow(item: griffe.Object | griffe.Alias, names: list[str]) -> str | None:
    for name in names:
        if name not in item.all_members:
            return None
        item = item.all_members[name]
    if item.is_module and item.parent is not None and item.name in (item.parent.exports or ()):
        # `apo.attach` is a function that hides the module which defines it.
        item = item.members.get(item.name, item)
    return item.canonical_path
