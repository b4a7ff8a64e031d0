"""Recipes and methods as small as can be, in place of the real ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from apo_experiments.method import Method
from apo_experiments.methods import METHODS
from apo_experiments.recipe import Recipe
from apo_experiments.recipes import FAMILIES, RECIPES


def install(recipes: Mapping[str, Recipe], methods: Mapping[str, Method]) -> None:
    """Put them into the registries for the rest of the process."""
    for registry, content in ((RECIPES, recipes), (METHODS, methods), (FAMILIES, {"no-tuning": ()})):
        registry.clear()
        registry.update(content)


@contextmanager
def installed(recipes: Mapping[str, Recipe], methods: Mapping[str, Method]) -> Iterator[None]:
    """Put them into the registries, and the real ones back at the end."""
    real = [(registry, dict(registry)) for registry in (RECIPES, METHODS, FAMILIES)]
    try:
        install(recipes, methods)
        yield
    finally:
        for registry, content in real:
            registry.clear()
            registry.update(content)
