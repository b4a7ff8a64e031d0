"""Where the wheel and torch alone are installed, every command is one sentence that says what to install."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# Runs a command in a process that finds no package of the extra, whatever is installed here.
BLOCKED = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Nothing())
from apo_experiments.__main__ import main
sys.exit(main())
"""


def packages_of_the_extra() -> list[str]:
    """Read the names of the packages from the project file, as they are imported."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^experiments = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    return [name.replace("-", "_") for name in re.findall(r'^\s*"([\w-]+)', listed[1], re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "list",
        "run mnist-mlp --scale smoke",
        "sweep mnist-mlp --scale smoke",
        "plot",
        "report",
        "publish --to x",
        "data list",
    ],
)
def test_one_sentence_says_what_to_install(words, tmp_path):
    assert {"numpy", "matplotlib", "optuna"} <= set(packages_of_the_extra())
    code = BLOCKED.format(packages=packages_of_the_extra())
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "APO_DATA": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *words.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if words == "data list" and done.returncode == 0:  # it may need torch alone
        return
    assert done.returncode == 2 and "pip install 'apo-optim[experiments]'" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())
