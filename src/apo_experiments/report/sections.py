"""What the report says about each recipe, before it becomes HTML."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from apo_experiments.progress import counted
from apo_experiments.publication.compact import clean_command
from apo_experiments.recipe import Entry, Recipe
from apo_experiments.records import Record
from apo_experiments.results import Result, current, findings, set_words, summarise
from apo_experiments.roles import is_swept
from apo_experiments.runs import RunConfig
from apo_experiments.swept import points_of_grids


@dataclass(frozen=True)
class Part:
    """A recipe at one scale.

    Attributes:
        scale: The scale.
        records: Its runs.
        results: One for each entry.
        findings: Sentences on which method is best and what falls short.
        figure: The figure as SVG, or None if there is nothing to draw.
        others: How many runs with other settings (sweeps, ``--set``) are left out.
        grids: How many points a sweep has tried, by label, if the best of them represents an entry.
        sweeps: The commands that tried them.
    """

    scale: str
    records: list[Record]
    results: list[Result]
    findings: list[str]
    figure: bytes | None
    others: int
    grids: Mapping[str, int] = field(default_factory=dict)
    sweeps: Sequence[str] = ()

    @property
    def seconds(self) -> float:
        """Training time of all runs."""
        return sum((record.summary or {}).get("seconds") or 0.0 for record in self.records)

    def command(self, recipe: Recipe) -> str:
        """Return the commands that repeat these runs.

        Args:
            recipe: The recipe, whose own methods, length and settings need not be named.
        """
        run = [record for record in self.records if record.config.label not in self.grids]
        return "\n".join([*self.sweeps, *_commands(recipe, self.scale, run)])

    def origins(self) -> list[tuple[str, str]]:
        """Return the distinct facts on where the runs come from, as pairs of a name and a text."""
        found: dict[tuple[str, str], None] = {}
        for record in self.records:
            header = record.header
            found["Command", shlex.join(map(str, header.get("command") or []))] = None
            found["Commit", str(header.get("commit") or "unknown")] = None
            found["Hardware", _facts(header.get("hardware"))] = None
            found["Versions", _facts(header.get("versions"))] = None
        order = ["Command", "Commit", "Hardware", "Versions"]
        return sorted((pair for pair in found if pair[1]), key=lambda pair: order.index(pair[0]))

    def settings(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the epochs, hyperparameters and options of each entry that was run."""
        return [
            (label, {"epochs": config.epochs, **config.hyper, **config.options})
            for label, config in {record.config.label: record.config for record in self.records}.items()
        ]


@dataclass(frozen=True)
class Section:
    """A recipe in the report.

    Attributes:
        recipe: The recipe.
        parts: Its scales that have records, the largest first.
    """

    recipe: Recipe
    parts: list[Part]

    def commands(self) -> list[str]:
        """Return the commands that run the recipe at its scales."""
        return [f"apo run {self.recipe.name} --scale {scale}" for scale in self.recipe.scales]

    def entry(self, label: str) -> Entry:
        """Return the entry of a label."""
        return next(entry for entry in self.recipe.entries if entry.label == label)


def section(recipe: Recipe, records: Sequence[Record]) -> Section:
    """Collect the results of a recipe.

    The smoke scale only shows that a recipe runs, so it is left out if there is a larger one.

    Args:
        recipe: The recipe.
        records: All records.
    """
    own = [record for record in records if record.config.recipe == recipe.name]
    scales = [scale for scale in reversed(list(recipe.scales)) if any(r.config.scale == scale for r in own)]
    larger = [scale for scale in scales if scale != "smoke"]
    parts = [_part(recipe, scale, own) for scale in larger or scales]
    return Section(recipe, [part for part in parts if part.records])


def _part(recipe: Recipe, scale: str, own: Sequence[Record]) -> Part:
    from apo_experiments import figures

    chosen = current(recipe, scale, own)
    results = summarise(recipe, chosen)
    drawable = [record for record in chosen if record.rows]
    figure = figures.svg(figures.draw(recipe, drawable)) if drawable else None
    here = [record for record in own if record.config.scale == scale]
    grids = points_of_grids(here, chosen)
    sentences = [*findings(recipe, scale, results), *_swept(grids)]
    swept = [record for record in here if record.config.label in grids and is_swept(record)]
    sweeps = list(dict.fromkeys(shlex.join(clean_command(record.header["command"])) for record in swept))
    return Part(scale, chosen, results, sentences, figure, len(here) - len(chosen), grids, sweeps)


def _swept(grids: Mapping[str, int]) -> list[str]:
    """Return a note for each entry whose value is the best of many runs."""
    return [
        f"{label} was swept: shown is the best of {counted(points, 'point')} of the grid."
        for label, points in grids.items()
    ]


def _commands(recipe: Recipe, scale: str, records: Sequence[Record]) -> list[str]:
    """Return one command for all methods that differ from the recipe in the same way."""
    from apo_experiments.recipes import plan

    planned = {config.label: config for config in plan(recipe, scale)}
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        changes = tuple(_changes(planned[record.config.label], record.config))
        groups.setdefault(changes, []).append(record)
    commands = []
    for changes, runs in groups.items():
        labels = list(dict.fromkeys(record.config.label for record in runs))
        words = ["apo", "run", recipe.name, "--scale", scale, "--seeds", str(1 + max(r.config.seed for r in runs))]
        words += [] if len(labels) == len(recipe.entries) else ["--method", *labels]
        commands.append(shlex.join([*words, *changes]))
    return commands


def _changes(usual: RunConfig, config: RunConfig) -> list[str]:
    """Return the options that turn the recipe's current plan into this run, for settings that it still has."""
    known, own = ({**run.hyper, **run.options} for run in (usual, config))
    # As JSON: a record has lists where a plan has tuples.
    differing = [key for key in known if key in own and _text(known[key]) != _text(own[key])]
    length = [] if config.epochs == usual.epochs else ["--epochs", str(config.epochs)]
    return [*length, "--set", *set_words({key: own[key] for key in differing})] if differing else length


def _facts(facts: Any) -> str:
    return ", ".join(f"{name} {fact}" for name, fact in facts.items()) if isinstance(facts, dict) else ""


def _text(setting: Any) -> str:
    return json.dumps(setting, default=str)
