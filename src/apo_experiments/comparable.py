"""What keeps a run from being compared with the paper's value: another task, or another method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apo_experiments.recipe import Recipe
from apo_experiments.runs import RunConfig

__all__ = ["MARK", "differences", "differences_of_scale", "own_method"]

#: Options that change speed and rounding alone.
_ROUNDING = ("channels_last", "tf32")

#: Follows the name of a method that is not the paper's.
MARK = "†"


def differences(recipe: Recipe, label: str, epochs: int, options: Mapping[str, Any]) -> str:
    """Return how the task and the length of a run differ from the paper's, or nothing if they are the same.

    Args:
        recipe: The recipe.
        label: The entry, whose own options belong to the paper's setting; any other text for none.
        epochs: The length of the run.
        options: The options of its task.

    Example:
        >>> from apo_experiments.recipes import RECIPES
        >>> differences(RECIPES["mnist-mlp"], "SGD-APO", 10, {"width": 0.2})
        'width 0.2 (paper: 1), 10 epochs (paper: 100)'
    """
    if "paper" not in recipe.scales:
        return ""
    size = recipe.scales["paper"]
    own = next((entry.options for entry in recipe.entries if entry.label == label), {})
    paper = {**recipe.defaults, **size.options, **own}
    parts = [
        f"{key.replace('_', ' ')} {_text(options[key])} (paper: {_text(paper[key])})"
        for key in paper
        if key in options and key not in _ROUNDING and _text(options[key]) != _text(paper[key])
    ]
    if epochs != size.epochs:
        parts.append(f"{epochs} {'epoch' if epochs == 1 else 'epochs'} (paper: {size.epochs})")
    return ", ".join(parts)


def differences_of_scale(recipe: Recipe, scale: str) -> str:
    """Return how a scale of a recipe differs from the paper's."""
    size = recipe.scales[scale]
    return differences(recipe, "", size.epochs, {**recipe.defaults, **size.options})


def own_method(config: RunConfig) -> str:
    """Return in which way a method is this library's and not the paper's, or nothing if it is the paper's.

    Example:
        >>> own_method(RunConfig("r", "APO", "sgdm-apo", "cpu", 0, 1, {"preset": "default", "total_steps": "auto"}))
        "the library's settings, told how long the run is (total_steps)"
        >>> own_method(RunConfig("r", "APO", "sgdm-apo", "cpu", 0, 1, {"preset": "paper", "total_steps": None}))
        ''
    """
    if "apo" not in config.method or config.hyper.get("preset") == "paper":
        return ""
    return "the library's settings" + (
        ", told how long the run is (total_steps)" if config.hyper.get("total_steps") else ""
    )


def _text(option: Any) -> str:
    """Write an option; None stands for all rows, images or sentences that there are."""
    if option is None:
        return "all"
    if isinstance(option, (list, tuple)):
        return "-".join(map(str, option))
    return f"{option:g}" if isinstance(option, float) else str(option)
