"""Every command line of the documentation is one that the command `apo` understands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from apo_experiments.cli import parser
from apo_experiments.data.registry import DATASETS
from apo_experiments.recipes import FAMILIES, RECIPES

pytestmark = pytest.mark.docs

PAGES = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


def command_lines() -> list[str]:
    blocks = [block for page in PAGES for block in BLOCK.findall(page.read_text())]
    return [line for block in blocks for line in block.splitlines() if line.startswith("apo ")]


def test_the_guide_shows_every_command():
    shown = {line.split()[1] for line in command_lines()}
    assert shown == {"list", "run", "sweep", "plot", "report", "publish", "data"}


@pytest.mark.parametrize("line", command_lines())
def test_command_line_is_understood(line):
    parsed = parser().parse_args(shlex.split(line, comments=True)[1:])
    named = getattr(parsed, "recipes", None) or [getattr(parsed, "recipe", "all")]
    assert set(named) <= {*RECIPES, *FAMILIES, "all"}
    assert set(getattr(parsed, "names", None) or []) <= {*DATASETS, "all"}
