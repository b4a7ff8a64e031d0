"""Turn LaTeX into MathML while the site is built.

Browsers draw MathML by themselves, so a page needs no script and no network to show its formulas. A formula that cannot
be converted is a warning, which fails the strict build.
"""

from __future__ import annotations

import html
import logging
import re

from latex2mathml.converter import convert

__all__ = ["on_page_content", "to_mathml"]

log = logging.getLogger("mkdocs.hooks.mathematics")

# What pymdownx.arithmatex makes of $x$ and $$x$$ in its generic mode.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</\1>', re.DOTALL)
# The converter hands on what it does not know as it is, with its backslash.
UNKNOWN = re.compile(r">([^<]*\\[^<]*)<")


def on_page_content(content: str, page, **_) -> str:
    """Replace the formulas of a page (a hook of mkdocs)."""

    def replace(match: re.Match[str]) -> str:
        latex = html.unescape(match["latex"])
        try:
            return to_mathml(latex, display="block" if match[1] == "div" else "inline")
        except Exception as error:
            log.warning("%s: the formula %r was not understood: %s", page.file.src_uri, latex, error)
            return match[0]

    return FORMULA.sub(replace, content)


def to_mathml(latex: str, display: str) -> str:
    r"""Convert one formula.

    Args:
        latex: The formula without its delimiters. Lines separated by ``\\`` are aligned at ``&``, as Sphinx does.
        display: ``"inline"`` or ``"block"``.

    Returns:
        A ``<math>`` element.

    Raises:
        ValueError: If the formula contains an unknown command.
    """
    # TeX leaves a thin space between a function and an argument without parentheses.
    latex = re.sub(r"\\(log|exp)(?![A-Za-z])(?=\s*[\\A-Za-z])", r"\\\1\\,", latex.strip())
    latex = re.sub(r"\\arg\b", r"\\operatorname{arg}\\,", latex)
    if "&" in latex and r"\begin" not in latex:
        latex = rf"\begin{{aligned}}{latex}\end{{aligned}}"
    mathml = convert(latex, display=display).replace(r"\_", "_")
    unknown = UNKNOWN.search(mathml)
    if unknown:
        raise ValueError(f"unknown command in {unknown[1]}")
    return mathml
