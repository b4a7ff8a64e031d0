"""Ablations: one row of panels for each option that differs between the entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from apo_experiments.figures.curves import axis_name, draw_panel
from apo_experiments.figures.style import COLOURS, grid, scale_axis
from apo_experiments.recipe import Recipe
from apo_experiments.records import Record, by_label, grouped
from apo_experiments.results import setting_text, summarise


def ablation(records: Sequence[Record], recipe: Recipe) -> Figure:
    """Draw, for each varied option, loss and rate coloured by its value, and the final metric against it."""
    keys = varied(records) or [""]
    series = [(key, runs) for key in keys for runs in _along(records, key, keys)]
    figure, axes = grid(len(series), 3)
    for row, (key, runs) in zip(axes, series, strict=True):
        _draw_row(row, runs, recipe, key)
    return figure


def varied(records: Sequence[Record]) -> list[str]:
    """Return the options and hyperparameters that differ between runs of one method.

    A baseline of another method has other hyperparameters, but those are not what an ablation varies.
    """
    values: dict[str, dict[str, set[str]]] = {}
    for record in records:
        for key, setting in _settings(record).items():
            values.setdefault(key, {}).setdefault(record.config.method, set()).add(setting_text(setting))
    return [key for key, by_method in values.items() if max(map(len, by_method.values())) > 1]


def _settings(record: Record) -> dict[str, Any]:
    return {**record.config.options, **record.config.hyper}


def _along(records: Sequence[Record], key: str, keys: Sequence[str]) -> list[list[Record]]:
    """Return the series in which only ``key`` differs: the most common one, and others of at least three values.

    If options change together, so that no series has two values of ``key``, return all runs.
    """
    able = [record for record in records if key in _settings(record)] or list(records)
    others = [other for other in keys if other != key]
    groups = grouped(able, lambda record: tuple(setting_text(_settings(record).get(other)) for other in others))
    sizes = {name: len({setting_text(_settings(record).get(key)) for record in runs}) for name, runs in groups.items()}
    longest = max(sizes, key=lambda name: sizes[name])
    return (
        [runs for name, runs in groups.items() if sizes[name] > 2 or name == longest] if sizes[longest] > 1 else [able]
    )


def _draw_row(row: Sequence[Axes], records: Sequence[Record], recipe: Recipe, key: str) -> None:
    groups = by_label(records)
    order = sorted(groups, key=lambda label: _rank(_settings(groups[label][0]).get(key)))
    colours = _colours([_settings(groups[label][0]).get(key) for label in order])
    styles = {label: {"color": colour, "linewidth": 1.6} for label, colour in zip(order, colours, strict=True)}
    for panel, column in zip(row, ("train_loss", "rate"), strict=False):
        draw_panel(panel, records, recipe, column, styles=styles)
    row[0].legend(fontsize="x-small", loc="best")
    _draw_final(row[2], order, colours, recipe, records, key)


def _draw_final(
    axes: Axes, order: Sequence[str], colours: Sequence[Any], recipe: Recipe, records: Sequence[Record], key: str
) -> None:
    groups = by_label(records)
    results = {result.label: result for result in summarise(recipe, records)}
    names = [setting_text(_settings(groups[label][0]).get(key)) for label in order]
    if len(set(names)) < len(names):  # several entries with one value: only their labels distinguish them
        names = list(order)
    for position, (label, colour) in enumerate(zip(order, colours, strict=True)):
        values, mean = results[label].values, results[label].mean
        axes.plot([position] * len(values), values, "o", color=colour, alpha=0.6, markersize=5)
        if mean is not None:
            axes.plot(position, mean, "_", color=colour, markersize=16, markeredgewidth=2.5)
        else:
            axes.annotate("diverged", (position, 0.03), xycoords=("data", "axes fraction"), rotation=90, ha="center")
    scale_axis(axes, [figure for result in results.values() for figure in result.values])
    rotation = 30 if sum(map(len, names)) > 24 else 0  # more would run into each other
    axes.set_xticks(range(len(order)), names, rotation=rotation, ha="right" if rotation else "center")
    axes.set_xlim(-0.5, len(order) - 0.5)
    axes.set(xlabel=axis_name(key), ylabel=f"final {axis_name(recipe.metric)}")


def _rank(setting: Any) -> tuple[int, float, str]:
    """Return a key that sorts numbers by size and before everything else."""
    if isinstance(setting, (int, float)) and not isinstance(setting, bool):
        return (0, float(setting), "")
    return (1, 0.0, setting_text(setting))


def _colours(settings: Sequence[Any]) -> list[Any]:
    """Return shades for numbers, distinct colours for everything else."""
    if len(settings) > 2 and all(_rank(setting)[0] == 0 for setting in settings):
        # The last tenth of the map is a yellow that is invisible on white.
        shades = ScalarMappable(Normalize(0, (len(settings) - 1) / 0.9), "viridis")
        return [shades.to_rgba(position) for position in range(len(settings))]  # type: ignore[arg-type]
    return [COLOURS[position % len(COLOURS)] for position in range(len(settings))]
