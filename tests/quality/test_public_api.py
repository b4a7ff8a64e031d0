"""No public name is undocumented, and what users import first shows how it is used."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import apo

# Every module below apo whose `__all__` users import from. Optional ones need not exist; apo itself must.
EXPORTING = ["apo", "apo.rules", "apo.preconditioners", "apo.discrepancy", "apo.reference"]


def _modules() -> Iterator[str]:
    """Yields the name of every module of the library; importing integrations must need no extra package."""
    yield "apo"
    for info in pkgutil.walk_packages(apo.__path__, prefix="apo."):
        yield info.name


def _exported() -> Iterator[tuple[str, str]]:
    for module in EXPORTING:
        if importlib.util.find_spec(module) is not None:
            for name in importlib.import_module(module).__all__:
                yield module, name


EXPORTED = list(_exported())
MODULES = list(_modules())


def own_docstring(thing: object) -> str:
    """Returns the docstring that someone wrote for this class, function or module.

    One inherited from a base class does not count, nor the signature that dataclasses and named tuples show.
    """
    if not inspect.isclass(thing):
        return (thing.__doc__ or "").strip()
    text = (vars(thing).get("__doc__") or "").strip()
    return "" if text.startswith(f"{thing.__name__}(") else text


def is_class_or_function(thing: object) -> bool:
    """Tells what carries a docstring from constants and type aliases, which show the one of their type."""
    return inspect.isclass(thing) or inspect.isroutine(thing)


def undocumented_members(cls: type) -> list[str]:
    """Returns the public methods and properties that `cls` defines and no base class of it documents."""
    missing = []
    for name, member in vars(cls).items():
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        is_method = inspect.isroutine(function) or isinstance(function, property)
        if is_method and not name.startswith("_") and not _documented_along_mro(cls, name):
            missing.append(f"{cls.__qualname__}.{name}")
    return missing


def _documented_along_mro(cls: type, name: str) -> bool:
    return any(own_docstring(vars(base)[name]) for base in cls.__mro__ if name in vars(base))


def public_definitions(module: ModuleType) -> Iterator[type | Callable]:
    """Yields the public classes and functions that are defined in this module, not imported into it."""
    for name, thing in vars(module).items():
        if name.startswith("_") or not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        if thing.__module__ == module.__name__:
            yield thing


@pytest.mark.parametrize("module, name", EXPORTED)
def test_exported_name_exists_and_has_a_docstring_of_its_own(module, name):
    thing = getattr(importlib.import_module(module), name)
    if is_class_or_function(thing) or inspect.ismodule(thing):
        assert own_docstring(thing), f"{module}.{name} has no docstring of its own"


@pytest.mark.parametrize("name", [name for module, name in EXPORTED if module == "apo"])
def test_top_level_export_shows_a_runnable_example(name):
    thing = getattr(apo, name)
    if is_class_or_function(thing):
        assert ">>> " in own_docstring(thing), f"apo.{name} has no example (>>> lines) in its docstring"


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_in_the_module_is_documented(name):
    module = importlib.import_module(name)
    assert own_docstring(module), f"{name} has no docstring"
    missing = []
    for thing in public_definitions(module):
        if not own_docstring(thing):
            missing.append(thing.__qualname__)
        if inspect.isclass(thing):
            missing.extend(undocumented_members(thing))
    assert not missing, f"{name}: no docstring for {', '.join(missing)}"


@pytest.mark.parametrize("module", EXPORTING)
def test_all_lists_every_name_once_and_nothing_private(module):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} does not exist")
    names = importlib.import_module(module).__all__
    assert names, f"{module} exports nothing"
    assert len(names) == len(set(names))
    assert [name for name in names if name.startswith("_") and name != "__version__"] == []


@pytest.mark.parametrize("file", ["CHANGELOG.md", "CITATION.cff"])
def test_version_is_the_one_that_the_papers_of_the_project_show(file):
    assert apo.__version__ in (Path(__file__).parents[2] / file).read_text()


class _Documented:
    """Stands for a documented base."""

    def method(self):
        """Does nothing."""


@dataclass
class _Generated:
    field: int


class _Inherits(_Documented):
    def method(self):
        pass

    def other(self):
        pass

    @property
    def value(self):
        return 0

    @classmethod
    def make(cls):
        pass

    def _private(self):
        pass


def test_checker_finds_what_is_undocumented_and_accepts_what_a_base_documents():
    assert own_docstring(_Inherits) == own_docstring(_Generated) == ""
    assert own_docstring(_Documented) == "Stands for a documented base."
    assert undocumented_members(_Documented) == []
    assert undocumented_members(_Inherits) == ["_Inherits.other", "_Inherits.value", "_Inherits.make"]
