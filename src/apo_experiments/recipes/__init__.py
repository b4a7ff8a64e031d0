"""Recipes: every figure and table of the paper, by name.

A recipe is data. To add one, write a file with a dict ``RECIPES`` and a line here.
"""

from __future__ import annotations

from apo_experiments.recipe import Recipe
from apo_experiments.recipes import (
    ablations,
    autoencoder,
    classification,
    figure_1,
    ill_conditioned,
    learning_rates,
    low_precision,
    no_tuning,
    rivals,
    rosenbrock,
    translation,
    uci,
)
from apo_experiments.recipes.planning import plan

__all__ = ["FAMILIES", "RECIPES", "plan"]

#: All recipes, in the order of the paper, and then those that are not in it.
RECIPES: dict[str, Recipe] = {
    **figure_1.RECIPES,
    **rosenbrock.RECIPES,
    **ill_conditioned.RECIPES,
    **uci.RECIPES,
    **autoencoder.RECIPES,
    **classification.RECIPES,
    **translation.RECIPES,
    **low_precision.RECIPES,
    **learning_rates.RECIPES,
    **ablations.RECIPES,
    **rivals.RECIPES,
    **no_tuning.RECIPES,
}

#: Names that stand for several recipes.
FAMILIES: dict[str, tuple[str, ...]] = {no_tuning.FAMILY: tuple(no_tuning.RECIPES)}
