"""README's table is a part of the one that is generated from records."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_rows_of_the_readme_are_those_of_the_benchmark():
    rows = re.findall(r"^\| [^|`*-][^|]* \|(?: [^|]+\|){5}$", (ROOT / "README.md").read_text(), re.MULTILINE)[1:]
    generated = (ROOT / "docs" / "no-tuning.md").read_text()
    assert len(rows) == 8
    for row in rows:
        assert f"\n{row}" in generated, row
