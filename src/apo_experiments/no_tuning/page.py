"""``docs/no-tuning.md``: tables and figures of the benchmark, all from its committed records."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from apo_experiments.figures import png
from apo_experiments.files import write_atomically
from apo_experiments.no_tuning import figures
from apo_experiments.no_tuning.archive import read
from apo_experiments.no_tuning.choice import Runs
from apo_experiments.no_tuning.scores import Score, Task, scored, standings, task_runs
from apo_experiments.publication.compact import rounded
from apo_experiments.publication.page import replaced
from apo_experiments.publication.rows import command_block, grid, machines
from apo_experiments.recipe import SCALES, Recipe
from apo_experiments.recipes.no_tuning import CHOOSING, FAMILY, RECIPES
from apo_experiments.records import Record
from apo_experiments.results import figure_text

__all__ = ["BEGIN", "END", "NAME", "markdown", "publish", "rows"]

NAME = "no-tuning.md"
BEGIN, END = "<!-- no-tuning:begin (made by `apo publish`) -->", "<!-- no-tuning:end -->"
#: The folder of the figures, relative to the page.
ASSETS = "assets/no-tuning"

#: Methods whose values, not only regrets, are shown for every task.
_SHOWN = ("SGDm tuned", "SGDm-APO", "AdamW tuned", "AdamW-APO", "Muon-APO", "NadamW calibrated")


def publish(results: Path, docs: Path) -> list[Path]:
    """Update the page, its JSON twin and its figures.

    Args:
        results: The folder of all compact records.
        docs: The folder with the page.

    Returns:
        The files that were written.
    """
    records, written = read(results), []
    for scale in _scales(records):
        runs = task_runs(RECIPES.values(), scale, records)
        tasks = scored(runs)
        if tasks:
            drawn = {"regrets": figures.regrets(tasks), "rates": figures.rates(runs, tasks)}
            for name, figure in drawn.items():
                written.append(docs / ASSETS / f"{name}-{scale}.png")
                write_atomically(written[-1], png(figure), "--docs")
    page, twin = docs / NAME, docs / "no-tuning.json"
    write_atomically(page, replaced(page.read_text(), markdown(records), BEGIN, END).encode(), "--docs")
    lines = ",\n".join(json.dumps(row) for row in rows(records))
    write_atomically(twin, f"[\n{lines}\n]\n".encode(), "--docs")
    return [*written, page, twin]


def markdown(records: Sequence[Record]) -> str:
    """Return what is between the comments of the page."""
    parts = [_scale(scale, task_runs(RECIPES.values(), scale, records)) for scale in _scales(records)]
    return "\n\n".join(parts) or "No records of such runs are committed yet."


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return one row for each scale, task and method: what ``docs/no-tuning.json`` has."""
    found = []
    for scale in _scales(records):
        for name, task in scored(task_runs(RECIPES.values(), scale, records)).items():
            for method, score in task.scores.items():
                row = {
                    "scale": scale,
                    "task": name,
                    "for_choosing": name in CHOOSING,
                    "method": method,
                    "entry": score.label,
                    "metric": task.recipe.metric,
                    "mean": score.mean,
                    "spread": score.spread,
                    "train_loss": score.train_loss,
                    "runs": score.runs,
                    "dead": score.dead,
                    "regret": score.regret,
                    "regret_at_equal_time": score.regret_at_equal_time,
                    "relative_time": score.relative_time,
                }
                found.append({key: None if value != value else rounded(value) for key, value in row.items()})  # no NaN
    return found


def _scales(records: Sequence[Record]) -> list[str]:
    return [scale for scale in reversed(SCALES) if any(record.config.scale == scale for record in records)]


def _scale(scale: str, runs: Mapping[str, tuple[Recipe, Runs]]) -> str:
    tasks = scored(runs)
    missing = [name for name in RECIPES if name not in tasks]
    untuned = [one.name for one in standings(tasks) if one.rank is not None]
    blocks = [f"## Scale {scale}"]
    if tasks:
        blocks += [
            _origin(tasks, runs),
            _standings(tasks),
            f"![Regrets of all methods]({ASSETS}/regrets-{scale}.png)",
            "### Task by task",
            f"{_used(tasks)} Test metric, and in brackets the regret in per cent; ± is the deviation over seeds.",
            _values(tasks),
            "Regret of every method without tuning, in per cent; **bold** is within 1% of the tuned rate or above it:",
            _by_task(tasks, untuned, _marked),
            "Training loss of the last epoch:",
            _by_task(
                tasks,
                ["SGDm tuned", "AdamW tuned", *untuned],
                lambda one: "" if one.train_loss is None else figure_text(one.train_loss),
            ),
            f"![Learned rates and tuned ones, task by task]({ASSETS}/rates-{scale}.png)",
            command_block(record.header.get("command") or [] for record in _records(tasks, runs)),
        ]
    if missing:
        blocks.append("Without all tuned rates yet: " + ", ".join(f"`{name}`" for name in missing) + ".")
    return "\n\n".join(blocks)


def _origin(tasks: Mapping[str, Task], runs: Mapping[str, tuple[Recipe, Runs]]) -> str:
    records = _records(tasks, runs)
    seeds = sorted({len(group) for name in tasks for group in runs[name][1].values()})
    one_for_all = next(
        (t.scores[name].label for t in tasks.values() if (name := "NadamW calibrated") in t.scores), None
    )
    chosen = (
        f" The rate that is best for NadamW over all tasks together is that of `{one_for_all}`." if one_for_all else ""
    )
    return (
        f"{len(tasks)} of {len(RECIPES)} tasks, {len(records)} runs, {' or '.join(map(str, seeds))} "
        f"seed{'' if seeds == [1] else 's'} each, on {machines(records)}.{chosen}"
    )


def _records(tasks: Mapping[str, Task], runs: Mapping[str, tuple[Recipe, Runs]]) -> list[Record]:
    return [record for name in tasks for group in runs[name][1].values() for record in group]


def _standings(tasks: Mapping[str, Task]) -> str:
    header = ["Method", "Mean rank", "Mean regret, %", "Worst regret, %", "Within 1%", "Diverged or dead"]
    header += ["Mean regret at equal time, %", "Time"]
    body = [
        [
            one.name,
            "tuned" if one.rank is None else f"{one.rank:.1f}",
            f"{one.regret:.1f}",
            f"{one.worst[0]:.1f} ({_short(one.worst[1])})",
            f"{one.near} of {one.tasks}",
            f"{one.dead} of {one.runs}",
            f"{one.regret_at_equal_time:.1f}",
            f"{one.relative_time:.2f}x",
        ]
        for one in standings(tasks)
    ]
    return grid(header, body)


def _used(tasks: Mapping[str, Task]) -> str:
    chosen = [f"`{_short(name)}`" for name in tasks if name in CHOOSING]
    others = [f"`{_short(name)}`" for name in tasks if name not in CHOOSING]
    return (
        f"For choosing settings of the library: {', '.join(chosen) or 'none of these'}. "
        f"Held out from that, only reported: {', '.join(others) or 'none'}."
    )


def _values(tasks: Mapping[str, Task]) -> str:
    body = [
        [
            f"`{_short(name)}`",
            task.recipe.metric.replace("_", " "),
            *(_value(task.scores[method]) if method in task.scores else "" for method in _SHOWN),
        ]
        for name, task in tasks.items()
    ]
    return grid(["Experiment", "Metric", *_SHOWN], body)


def _value(score: Score) -> str:
    spread = "" if score.spread is None else f" ± {score.spread:.2g}"
    rate = f" at {score.label.rpartition('-cosine-')[2]}" if "tuned" in score.name else f" ({score.regret:.1f})"
    return f"{figure_text(score.mean)}{spread}{rate}"


def _by_task(tasks: Mapping[str, Task], methods: Sequence[str], cell: Callable[[Score], str]) -> str:
    """Return a table with one row for each method and one column for each task."""
    body = [
        [method, *(cell(task.scores[method]) if method in task.scores else "" for task in tasks.values())]
        for method in methods
    ]
    return grid(["Method", *map(_short, tasks)], body)


def _marked(score: Score) -> str:
    text = "dead" if score.dead == score.runs else f"{score.regret:.1f}"
    return f"**{text}**" if score.regret <= 1.0 else text


def _short(name: str) -> str:
    return name.removeprefix(f"{FAMILY}-")
