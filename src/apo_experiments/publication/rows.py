"""Rows of the tables of results (one setting of a method each, next to the paper's value), and their Markdown."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from apo_experiments.publication.compact import rounded
from apo_experiments.recipe import Recipe
from apo_experiments.records import Record, grouped
from apo_experiments.results import Result, complete_settings, result, setting_text, variant
from apo_experiments.tuning import current, one_per_seed

#: One recipe at one scale.
Section = tuple[Recipe, str, list[Result]]


def rows(recipe: Recipe, scale: str, records: Sequence[Record]) -> list[Result]:
    """Return the rows of a recipe: for each method the setting shown in the table, then the other settings.

    Args:
        recipe: The recipe.
        scale: The scale.
        records: Records of results, of any recipe.
    """
    own = [record for record in records if (record.config.recipe, record.config.scale) == (recipe.name, scale)]
    shown = {record.config.label: record.config for record in current(recipe, scale, own)}
    groups = grouped([one for one in own if one.config.label in shown], lambda record: variant(record.config))
    order = {entry.label: position for position, entry in enumerate(recipe.entries)}
    found = []
    for group in map(one_per_seed, groups.values()):
        config = group[0].config
        usual, own = ({"epochs": one.epochs, **complete_settings(one)} for one in (shown[config.label], config))
        differing = [key for key in own if setting_text(usual.get(key)) != setting_text(own[key])]
        found.append(replace(result(recipe, config.label, group), settings={key: own[key] for key in differing}))
    return sorted(found, key=lambda row: (bool(row.settings), order[row.label], json.dumps(row.settings, default=str)))


def as_json(recipe: Recipe, scale: str, row: Result) -> dict[str, Any]:
    """Return a row of ``docs/results.json``."""
    content = {
        "table": recipe.paper,
        "row": recipe.name,
        "scale": scale,
        "method": row.label,
        "settings": dict(row.settings),
        "metric": recipe.metric,
        "paper": None if row.settings else row.paper,
        "mean": row.mean,
        "spread": row.deviation,
        "seeds": len(row.values),
        "diverged": row.diverged,
        "epochs": row.epochs,
        "hours": row.hours,
    }
    return {key: value if key in ("settings", "paper") else rounded(value) for key, value in content.items()}


#: Columns of text; all others hold numbers and are aligned to the right.
_TEXT = ("Experiment", "Method", "Metric", "With")
#: More commands than these are folded.
_UNFOLDED = 3


def grid(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [header, ["---" if name in _TEXT else "--:" for name in header], *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def words(metric: str) -> str:
    """Return the name of a metric as text."""
    return metric.replace("_", " ")


def anchor(heading: str) -> str:
    """Return the address of a heading within its page, as both the site and GitHub build it."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def machines(records: Iterable[Record]) -> str:
    """Return where runs were made: each device and version of torch once, with its commits."""
    commits: dict[str, dict[str, None]] = {}
    for header in (record.header for record in records):
        device = (header.get("hardware") or {}).get("device", "unknown")
        place = f"{device}, torch {(header.get('versions') or {}).get('torch', 'unknown')}"
        commits.setdefault(place, {})[str(header.get("commit") or "unknown")[:7]] = None
    return "; ".join(f"{place}, commit{'s' * (len(own) > 1)} {', '.join(own)}" for place, own in commits.items())


def command_block(commands: Iterable[Sequence[str]]) -> str:
    """Return commands as Markdown: runs that differ only in their recipes together, and a long list folded.

    Example:
        >>> print(command_block([["apo", "run", "a", "--seeds", "3"], ["apo", "run", "b", "--seeds", "3"]]))
        ```bash
        apo run a b --seeds 3
        ```
    """
    recipes: dict[tuple[str, ...], dict[str, None]] = {}
    for command in filter(None, commands):
        # Only `run` takes several recipes, which come before its options.
        names = list(takewhile(lambda word: not word.startswith("-"), command[2:])) if command[1:2] == ["run"] else []
        key = (*command[:2], "", *command[2 + len(names) :])
        recipes.setdefault(key, {}).update(dict.fromkeys(names))
    lines = [shlex.join([*key[:2], *names, *key[3:]]) for key, names in recipes.items()]
    block = "```bash\n" + "\n".join(lines) + "\n```"
    if len(lines) <= _UNFOLDED:
        return block
    return f"<details>\n<summary>The {len(lines)} commands of these runs</summary>\n\n{block}\n\n</details>"
