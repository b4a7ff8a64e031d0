"""What the report says about each recipe, before it becomes HTML."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from apo_experiments.recipe import Entry, Recipe
from apo_experiments.records import Record
from apo_experiments.results import Result, current, findings, summarise

__all__ = ["Part", "Section", "section"]


@dataclass(frozen=True)
class Part:
    """A recipe at one scale.

    Attributes:
        scale: The scale.
        records: Its runs.
        results: One for each entry.
        findings: Sentences on who is in front and what falls short.
        figure: The figure as SVG, or None if there is nothing to draw.
        others: How many runs with other settings (sweeps, ``--set``) are left out.
    """

    scale: str
    records: list[Record]
    results: list[Result]
    findings: list[str]
    figure: bytes | None
    others: int

    @property
    def seconds(self) -> float:
        """Training time of all runs."""
        return sum((record.summary or {}).get("seconds", 0.0) for record in self.records)

    def command(self) -> str:
        """Return the command that repeats these runs, as far as the recipe's own settings go."""
        seeds = max((record.config.seed for record in self.records), default=0) + 1
        return f"apo run {self.records[0].config.recipe} --scale {self.scale} --seeds {seeds}"

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
    """Gather what there is on a recipe.

    The smoke scale only shows that a recipe runs, so it is left out where there is a larger one.

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
    others = sum(record.config.scale == scale for record in own) - len(chosen)
    return Part(scale, chosen, results, findings(recipe, scale, results), figure, others)


def _facts(facts: Any) -> str:
    return ", ".join(f"{name} {fact}" for name, fact in facts.items()) if isinstance(facts, dict) else ""
