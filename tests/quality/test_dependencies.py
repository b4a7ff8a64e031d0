"""The modules of apo depend on each other in one direction, and on torch alone.

The table below is the architecture. A module may import from components in strictly lower layers and from its
own component (`apo.rules.learning_rate` from `apo.rules.base`); two components of one layer know nothing of
each other. Imports inside functions and under `if TYPE_CHECKING` count as well: they hide a cycle, they do
not cure it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

LAYERS = {
    "errors": 0,
    "arguments": 0,
    "_version": 0,
    "torch_internals": 0,
    "distributed": 1,
    "vectors": 2,
    "passes": 3,
    "discrepancy": 4,
    "preconditioners": 4,
    "rules": 5,
    "core": 6,
    "loop": 7,
    "integrations": 8,
    "reference": 8,
    "__init__": 9,
}

# Stricter than its layer: an oracle that shares code with what it judges proves nothing.
ONLY = {"reference": {"errors", "vectors", "discrepancy"}}

# May import other packages than torch, where they are used: inside functions or for annotations.
LAZY_THIRD_PARTY = {"integrations"}

SOURCE = Path(__file__).parents[2] / "src" / "apo"


@dataclass(frozen=True)
class Import:
    """One imported module, by its absolute dotted name.

    Attributes:
        target: For example `apo.rules.base`, `torch.nn` or `numpy`.
        line: Where it stands.
        runs_on_import: Whether importing the file executes it; false inside functions and `TYPE_CHECKING`.
    """

    target: str
    line: int
    runs_on_import: bool


def imports_of(file: Path, root: Path) -> list[Import]:
    """Returns every import of one file of the package that lies at `root`."""
    package = [root.name, *file.relative_to(root).parent.parts]
    return list(_walk(ast.parse(file.read_text(), str(file)), package, runs_on_import=True))


def _walk(node: ast.AST, package: list[str], runs_on_import: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, runs_on_import)
    elif isinstance(node, ast.ImportFrom):
        for target in _targets(node, package):
            yield Import(target, node.lineno, runs_on_import)
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _walk(child, package, runs_on_import=False)
        for child in node.orelse:
            yield from _walk(child, package, runs_on_import)
    else:
        in_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for child in ast.iter_child_nodes(node):
            yield from _walk(child, package, runs_on_import and not in_function)


def _targets(node: ast.ImportFrom, package: list[str]) -> list[str]:
    base = package[: len(package) - node.level + 1] if node.level else []
    module = ".".join([*base, *([node.module] if node.module else [])])
    # `from apo import x` may name a submodule or a name of the package: keep x, `component` decides.
    return [f"{module}.{alias.name}" for alias in node.names] if module == package[0] else [module]


def component(target: str) -> str:
    """Returns the row of the table for `apo.<...>`; a name that is no module belongs to `apo/__init__`."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "__init__"


def violations(root: Path) -> list[str]:
    """Returns one sentence for each import of the package at `root` that breaks the rules above."""
    found = []
    for file in sorted(root.rglob("*.py")):
        own = file.relative_to(root).with_suffix("").parts[0]
        if own not in LAYERS:
            found.append(f"{file.name}: the component {own!r} is unknown; add it to LAYERS in {Path(__file__).name}.")
            continue
        for item in imports_of(file, root):
            reason = _reason_against(own, item, root.name)
            if reason:
                found.append(f"{file.relative_to(root)}:{item.line} imports {item.target}: {reason}")
    return found


def _reason_against(own: str, item: Import, package: str) -> str | None:
    top = item.target.split(".")[0]
    if top == package:
        other = component(item.target)
        if other == own:
            return None
        if own in ONLY and other not in ONLY[own]:
            return f"{own} may import only {', '.join(sorted(ONLY[own]))}."
        if LAYERS[other] >= LAYERS[own]:
            return f"{own} (layer {LAYERS[own]}) may not depend on {other} (layer {LAYERS[other]})."
    elif top == "apo_experiments":
        return "experiments import the library, never the reverse."
    elif top != "torch" and top not in sys.stdlib_module_names:
        if own not in LAZY_THIRD_PARTY:
            return "the library depends on torch alone."
        if item.runs_on_import:
            return "integrations import other packages inside the functions that use them."
    return None


def test_dependencies_point_one_way():
    files = list(SOURCE.rglob("*.py"))
    assert SOURCE / "__init__.py" in files, f"no package at {SOURCE}"
    assert not violations(SOURCE), "\n" + "\n".join(violations(SOURCE))


@pytest.fixture
def check(tmp_path):
    """Returns a function that lays out files as a package called apo and returns its violations."""

    def lay_out_and_check(**sources: str) -> list[str]:
        for name, source in sources.items():
            file = tmp_path / "apo" / (name.replace("__in__", "/") + ".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        return violations(tmp_path / "apo")

    return lay_out_and_check


@pytest.mark.parametrize(
    "name, source",
    [
        ("vectors", "from apo.core.meta_step import step"),
        ("vectors", "from .core import step"),
        ("vectors", "from . import core"),
        ("vectors", "from apo import core"),
        ("vectors", "import apo.core.meta_step as e"),
        ("vectors", "import apo"),
        ("vectors", "from apo import LearningRate"),
        ("discrepancy", "from apo.preconditioners import Kronecker"),
        ("discrepancy", "def f():\n    from .rules import base"),
        ("core", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .loop import APO"),
        ("rules__in__learning_rate", "from ..core import step"),
        ("rules__in__learning_rate", "from .. import core"),
        ("rules__in__learning_rate", "try:\n    import apo.core.meta_step\nexcept ImportError:\n    pass"),
        ("reference__in__unrolled", "from ..rules.base import Rule"),
        ("reference__in__unrolled", "from ..preconditioners import Kronecker"),
        ("core", "import apo_experiments.tasks"),
        ("integrations__in__lightning", "def f():\n    from apo_experiments import tasks"),
        ("core", "import numpy"),
        ("core", "def f():\n    import numpy"),
        ("integrations__in__lightning", "import lightning"),
        ("integrations__in__lightning", "class C:\n    from lightning import Callback"),
    ],
)
def test_checker_reports_a_forbidden_import(check, name, source):
    assert len(check(**{name: source})) == 1


@pytest.mark.parametrize(
    "name, source",
    [
        (
            "core",
            "from __future__ import annotations\nimport math\nimport torch.nn\nfrom torch import Tensor",
        ),
        ("core", "from .rules import LearningRate\nfrom . import vectors\nfrom apo.core.records import Record"),
        (
            "rules__in__learning_rate",
            "from .base import Rule\nfrom apo.rules.base import Rule\nfrom .. import vectors",
        ),
        (
            "reference__in__unrolled",
            "from ..discrepancy import CategoricalKL\nfrom .curvature import hessian",
        ),
        ("integrations__in__lightning", "def f():\n    import lightning\nfrom ..loop import APO"),
        ("integrations__in__lightning", "import typing\nif typing.TYPE_CHECKING:\n    import lightning"),
        ("__init__", "from ._version import __version__\nfrom .loop import APO\nfrom . import reference"),
    ],
)
def test_checker_accepts_a_permitted_import(check, name, source):
    assert check(**{name: source}) == []


def test_contributing_has_the_same_layers():
    table = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (\d) \| (`[^|]*) \|", table, flags=re.MULTILINE)
    written = {name: int(layer) for layer, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert written == {name: layer for name, layer in LAYERS.items() if name != "__init__"}


# Private attributes and functions of torch, by the names that apo has used.
PRIVATE_OF_TORCH = re.compile(
    r"torch\._|\._foreach_|\w\._version\b(?!\w)|\b_orig_mod\b|\._optimizer_step_|\._get_fsdp|_active_ddp|_wrapped_by_lr"
    r"|(?<!self)\._(parameters|buffers|modules)\b(?!\()"
)


def test_private_names_of_torch_stand_in_one_file():
    found = [
        f"{file.relative_to(SOURCE)}:{number} {line.strip()}"
        for file in sorted(SOURCE.rglob("*.py"))
        if file.name != "torch_internals.py"
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if PRIVATE_OF_TORCH.search(line) and "from apo._version" not in line
    ]
    assert not found, "\n" + "\n".join(found)


def test_the_top_level_has_at_most_eight_modules():
    assert len(list(SOURCE.glob("*.py"))) <= 8


def test_checker_asks_for_a_row_for_an_unknown_module(check):
    (message,) = check(helpers="import math")
    assert "'helpers'" in message and "add it to LAYERS" in message
