"""The summary of the results: APO against the best other method, ours against the paper's, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from apo_experiments.comparable import MARK
from apo_experiments.publication.rows import Row, Section, anchor, grid, seeds, spread, words
from apo_experiments.recipe import NOT_IN_PAPER, Entry, Recipe
from apo_experiments.records import grouped
from apo_experiments.results import figure_text

_HEADER = [
    "Experiment",
    "Metric",
    "APO, ours",
    "APO, paper",
    "Best other, ours",
    "Best other, paper",
    "Seeds",
    "Epochs",
]


def summary(found: Sequence[Section], recipes: Mapping[str, Recipe]) -> str:
    """Return the summary in Markdown.

    Args:
        found: The recipes with records, each at one scale.
        recipes: All recipes, also those without records.
    """
    if not found:
        return "No records are committed yet."
    compared = [(section, pair) for section in found if (pair := _contest(section)) is not None]
    ahead = sum(_ahead(recipe, apo, other) for (recipe, _, _), (apo, other) in compared)
    with_paper = [
        recipe.worse(apo.result.mean or 0.0, theirs.paper or 0.0)
        for (recipe, _, _), (apo, _) in compared
        if (theirs := _paper(recipe, apo=True)) and not apo.result.differs
    ]
    reached = len(with_paper) - sum(with_paper)
    others = [recipe for recipe, _, _ in found if all(recipe is not one[0] for one, _ in compared)]
    blocks = [
        f"APO ends ahead of the best other method in {ahead} of {len(compared)} experiments, and reaches the paper's "
        f"value in {reached} of the {len(with_paper)} that have one and the paper's setting. The better of our two "
        f"values is bold. A value of the paper in brackets belongs to another setting than ours; {MARK} marks APO with "
        "the library's settings instead of the paper's.",
        grid(_HEADER, [_line(section, *pair) for section, pair in compared]),
    ]
    differing = [
        f"- {_link(recipe)}: {'; '.join(texts)}."
        for recipe, _, own in found
        if (texts := dict.fromkeys(row.result.differs for row in own if not row.settings and row.result.differs))
    ]
    if differing:
        blocks.append("**Not the paper's setting:**\n\n" + "\n".join(differing))
    if others:
        blocks.append(f"Also measured, without such a comparison: {', '.join(map(_link, others))}.")
    missing = [f"- {text}" for text in _missing(found, recipes)]
    if missing:
        blocks.append("**Not measured yet:**\n\n" + "\n".join(missing))
    return "\n\n".join(blocks)


def _link(recipe: Recipe) -> str:
    return f"[`{recipe.name}`](#{anchor(recipe.title)})"


def _contest(section: Section) -> tuple[Row, Row] | None:
    """Return the best row of APO and the best row of any other method, or None if one of them is missing."""
    recipe, _, own = section
    rows = [row for row in own if not row.settings and row.result.mean is not None]
    apo, other = (
        recipe.best(
            (row for row in rows if ("APO" in row.label) == ours), key=lambda row: row.result.mean, default=None
        )
        for ours in (True, False)
    )
    return None if recipe.compute is not None or not apo or not other else (apo, other)


def _paper(recipe: Recipe, apo: bool) -> Entry | None:
    """Return the method with the paper's best value, with APO or without."""
    entries = [entry for entry in recipe.entries if entry.paper is not None and ("APO" in entry.label) == apo]
    return recipe.best(entries, key=lambda entry: entry.paper, default=None)


def _paper_text(recipe: Recipe, row: Row, apo: bool) -> str:
    entry = _paper(recipe, apo)
    if entry is None:
        return "-"
    value = replace(row.result, paper=entry.paper).paper_text
    return value if apo else f"{entry.label} {value}"


def _ahead(recipe: Recipe, row: Row, other: Row) -> bool:
    assert row.result.mean is not None and other.result.mean is not None
    return recipe.worse(other.result.mean, row.result.mean)


def _line(section: Section, apo: Row, other: Row) -> list[str]:
    recipe, scale, _ = section
    runs = dict.fromkeys(seeds(row) for row in (apo, other))
    whole, epochs = recipe.scales[scale].epochs, apo.config.epochs
    return [
        _link(recipe) + ("" if scale == "paper" else f", {scale}"),
        words(recipe.metric),
        _ours(apo, _ahead(recipe, apo, other)),
        _paper_text(recipe, apo, apo=True),
        _ours(other, _ahead(recipe, other, apo)),
        _paper_text(recipe, other, apo=False),
        ", ".join(runs),
        str(epochs) if epochs == whole else f"{epochs} of {whole}",
    ]


def _ours(row: Row, first: bool) -> str:
    value = figure_text(row.result.mean)
    return f"{row.result.name} {f'**{value}**' if first else value} {spread(row)}".strip()


def _missing(found: Sequence[Section], recipes: Mapping[str, Recipe]) -> Iterator[str]:
    """List which recipes have no records, which lack methods, and which were run at a smaller scale only."""
    measured = {recipe.name for recipe, _, _ in found}
    absent = grouped([one for one in recipes.values() if one.name not in measured], lambda recipe: recipe.paper)
    rivals = absent.pop(NOT_IN_PAPER, [])
    if absent:
        groups = (f"{paper}: {', '.join(f'`{recipe.name}`' for recipe in group)}" for paper, group in absent.items())
        yield f"{'; '.join(groups)}."
    if rivals:
        names = ", ".join(f"`{recipe.name}`" for recipe in rivals)
        # The names of these recipes do not say which methods they compare.
        labels = dict.fromkeys(entry.label for recipe in rivals for entry in recipe.entries if "APO" not in entry.label)
        yield f"Other optimizers, which the paper does not have: {', '.join(labels)} in {names}."
    partly = [
        f"{', '.join(labels)} in `{recipe.name}`"
        for recipe, _, own in found
        if (labels := [entry.label for entry in recipe.entries if all(row.label != entry.label for row in own)])
    ]
    if partly:
        yield f"Methods: {'; '.join(partly)}."
    full = {recipe.name for recipe, scale, _ in found if scale == "paper"}
    small = [f"`{recipe.name}`" for recipe, _, _ in found if recipe.name not in full and "paper" in recipe.scales]
    if small:
        yield f"The paper's scale: {', '.join(dict.fromkeys(small))}."
