"""From records to results: their mean and spread, the comparison with the paper, and what keeps them from it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from apo_experiments.methods import METHODS
from apo_experiments.recipe import NOT_IN_PAPER, Recipe
from apo_experiments.recipes import RECIPES
from apo_experiments.records import Record, by_label, grouped
from apo_experiments.runs import RunConfig

#: Options that change speed and rounding alone.
_ROUNDING = ("channels_last", "tf32")

#: Follows the name of a method that is not the paper's.
MARK = "†"


@dataclass(frozen=True)
class Result:
    """The result of the runs of one entry of a recipe.

    Attributes:
        label: The entry's label.
        values: The recipe's metric at the end of each run that has one, by seed.
        diverged: How many runs diverged.
        unfinished: How many runs have not finished.
        paper: The paper's figure.
        differs: How the task differs from the paper's, so that the paper's figure cannot be compared.
        own: In which way the method is this library's and not the paper's.
        records: The runs, by seed.
        settings: How they differ from those of the same method that a table shows; empty for these.

    Example:
        >>> result = Result("SGDm", (75.0, 76.0), paper=75.73)
        >>> result.mean
        75.5
    """

    label: str
    values: tuple[float, ...] = ()
    diverged: int = 0
    unfinished: int = 0
    paper: float | None = None
    differs: str = ""
    own: str = ""
    records: tuple[Record, ...] = field(default=(), repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """The label, with a mark if the method is not the paper's."""
        return f"{self.label} {MARK}" if self.own else self.label

    @property
    def paper_text(self) -> str:
        """The paper's figure, in brackets if it cannot be compared."""
        return f"({figure_text(self.paper)})" if self.differs and self.paper is not None else figure_text(self.paper)

    @property
    def mean(self) -> float | None:
        """The mean over the seeds."""
        return math.fsum(self.values) / len(self.values) if self.values else None

    def spread(self) -> str:
        """Return the range over the seeds; empty for a single seed.

        Example:
            >>> Result("SGDm", (75.0, 76.0)).spread(), Result("SGDm", (75.0,)).spread()
            ('75.00 to 76.00', '')
        """
        if len(self.values) < 2:
            return ""
        low, high = min(self.values), max(self.values)
        return "identical" if low == high else f"{figure_text(low)} to {figure_text(high)}"

    @property
    def deviation(self) -> float | None:
        """The standard deviation over the seeds (of a sample); None for a single one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def deviation_text(self) -> str:
        """The same as text."""
        return "" if self.deviation is None else f"± {self.deviation:.2g}"

    @property
    def seeds(self) -> str:
        """The number of seeds, and of those that diverged."""
        return f"{len(self.values)}" + (f" + {self.diverged} diverged" if self.diverged else "")

    @property
    def hours(self) -> float:
        """Hours of training of all seeds together, without evaluation."""
        return sum(record.seconds for record in self.records) / 3600

    @property
    def epochs(self) -> int:
        """How long each run was."""
        return self.records[0].config.epochs


def value(record: Record, metric: str) -> float | None:
    """Return the final value of a metric, or None if the run has none: unfinished, diverged, or not measured.

    Example:
        >>> config = RunConfig("rosenbrock", "SGD", "sgd", "smoke", seed=0, epochs=1)
        >>> value(Record(config, {}, [], {"metrics": {"loss": 0.5}}), "loss")
        0.5
    """
    found = record.metrics.get(metric)
    return float(found) if found is not None and math.isfinite(found) else None


def summarise(recipe: Recipe, records: Iterable[Record]) -> list[Result]:
    """Return one result for each entry of a recipe, including those without records.

    Args:
        recipe: The recipe.
        records: Runs with one setting for each label, as from :func:`apo_experiments.tuning.current`.

    Example:
        >>> from apo_experiments.recipe import Entry
        >>> entries = (Entry("SGD", "sgd"), Entry("APO", "sgd-apo", paper=0.25))
        >>> recipe = Recipe("r", "", "", None, {}, (), {}, entries, metric="loss", goal="min")
        >>> run = Record(RunConfig("r", "SGD", "sgd", "cpu", seed=0, epochs=1), {}, [], {"metrics": {"loss": 0.5}})
        >>> [(result.label, result.mean, result.paper) for result in summarise(recipe, [run])]
        [('SGD', 0.5, None), ('APO', None, 0.25)]
    """
    groups = by_label(records)
    return [result(recipe, entry.label, groups.get(entry.label, [])) for entry in recipe.entries]


def result(recipe: Recipe, label: str, records: Sequence[Record]) -> Result:
    """Return the result of runs with one setting of a method.

    Example:
        >>> recipe = Recipe("r", "", "", None, {}, (), {}, (), metric="loss", goal="min")
        >>> config = RunConfig("r", "SGD", "sgd", "cpu", seed=0, epochs=1)
        >>> result(recipe, "SGD", [Record(config, {}, [], {"metrics": {}, "diverged": True})])
        Result(label='SGD', values=(), diverged=1, unfinished=0, paper=None, differs='', own='')
    """
    ordered = tuple(sorted(records, key=lambda record: record.config.seed))
    values = tuple(found for record in ordered if (found := value(record, recipe.metric)) is not None)
    diverged = sum(record.diverged for record in records)
    unfinished = sum(not record.finished for record in records)
    paper = next((entry.paper for entry in recipe.entries if entry.label == label), None)
    if not ordered:
        return Result(label, values, diverged, unfinished, paper)
    config = ordered[0].config
    differs = differences(recipe, label, config.epochs, config.options)
    own = own_method(config) if recipe.paper != NOT_IN_PAPER else ""
    return Result(label, values, diverged, unfinished, paper, differs, own, ordered)


def differences(recipe: Recipe, label: str, epochs: int, options: Mapping[str, Any]) -> str:
    """Return how the task and the length of a run differ from the paper's, or nothing if they are the same.

    Args:
        recipe: The recipe.
        label: The entry, whose own options belong to the paper's setting; any other text for none.
        epochs: The length of the run.
        options: The options of its task.

    Example:
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
    told = ", told how long the run is (total_steps)" if config.hyper.get("total_steps") else ""
    return f"the library's settings{told}"


def _text(option: Any) -> str:
    """Write an option; None stands for all rows, images or sentences that there are."""
    if option is None:
        return "all"
    if isinstance(option, (list, tuple)):
        return "-".join(map(str, option))
    return f"{option:g}" if isinstance(option, float) else str(option)


def leader(recipe: Recipe, results: Iterable[Result], paper: bool = False) -> Result | None:
    """Return the result that is best by the recipe's goal, or None if there is none, no contest or a tie.

    Args:
        recipe: The recipe, which says whether less or more is better.
        results: The results.
        paper: Whether the paper's figures count instead of ours.

    Example:
        >>> recipe = Recipe("r", "", "", None, {}, (), {}, (), metric="accuracy", goal="max")
        >>> leader(recipe, [Result("SGDm", (76.0,)), Result("APO", (77.0,)), Result("Adam")]).label
        'APO'
    """
    ranked = [(figure, result) for result in results if (figure := result.paper if paper else result.mean) is not None]
    if recipe.compute is not None or len(ranked) < (1 if paper else 2):  # exact updates do not compete
        return None
    best = recipe.best(figure for figure, _ in ranked)
    first = [result for figure, result in ranked if figure == best]
    return first[0] if len(first) == 1 else None


def findings(recipe: Recipe, scale: str, results: Sequence[Result]) -> list[str]:
    """Return sentences on which method is best and where our runs are worse than the paper.

    Example:
        >>> recipe = Recipe("r", "", "", None, {}, (), {}, (), metric="accuracy", goal="max")
        >>> findings(recipe, "paper", [Result("SGDm", (76.0,), paper=75.73), Result("APO", (75.5,), paper=77.42)])
        ['In front here: SGDm with 76.00; in the paper: APO with 77.42.',
         'APO falls short of the paper: 75.50 against 77.42.']
        >>> findings(recipe, "cpu", [Result("SGDm", (50.0,)), Result("APO", (50.0,))])
        ['In front here: several alike.']
        >>> small = Result("SGDm", (60.0,), paper=75.73, differs="width 0.5 (paper: 1)")
        >>> findings(recipe, "cpu", [small, Result("APO", (61.0,))])[1]
        "Not the paper's setting, whose figures stand in brackets: width 0.5 (paper: 1)."
    """
    sentences = []
    first, paper_first = leader(recipe, results), leader(recipe, results, paper=True)
    # Only if all methods that the paper compares are among the results, its best one is.
    whole = {entry.label for entry in recipe.entries if entry.paper is not None} <= {result.label for result in results}
    values = [result for result in results if result.mean is not None]
    if recipe.compute is not None or not values:
        pass
    elif scale == "smoke":
        sentences.append("This scale shows that everything runs; its figures say nothing about the methods.")
    elif len(values) > 1:
        ours = f"{first.label} with {figure_text(first.mean)}" if first else "several alike"
        other = ""
        if paper_first is not None and whole and not any(result.differs for result in results):
            other = f"; in the paper: {paper_first.label} with {figure_text(paper_first.paper)}"
        sentences.append(f"In front here: {ours}{other}.")
    sentences += _reservations(results) if scale != "smoke" else []
    if scale == "paper":
        for result in results:
            if result.mean is None or result.paper is None or result.differs:
                continue
            if recipe.worse(result.mean, result.paper):
                ours, theirs = figure_text(result.mean), figure_text(result.paper)
                sentences.append(f"{result.label} falls short of the paper: {ours} against {theirs}.")
    missing = [r.label for r in results if not (r.values or r.diverged or r.unfinished)]
    facts = {
        "Runs that diverged": [f"{result.label} ({result.diverged})" for result in results if result.diverged],
        "Unfinished runs, left out here": [f"{r.label} ({r.unfinished})" for r in results if r.unfinished],
        "Not run yet": missing if len(missing) < len(results) else [],
    }
    return sentences + [f"{fact}: {', '.join(labels)}." for fact, labels in facts.items() if labels]


def figure_text(number: float | None) -> str:
    """Format a number with four digits, including trailing zeros, or a dash for None.

    Example:
        >>> figure_text(94.7512), figure_text(78.0), figure_text(1.3e-13), figure_text(None)
        ('94.75', '78.00', '1.300e-13', '-')
    """
    return "-" if number is None else f"{number:#.4g}".removesuffix(".")


def set_words(settings: Mapping[str, Any]) -> list[str]:
    """Format settings as ``--set`` takes them.

    Example:
        >>> set_words({"lr": 0.1, "betas": (0.9, 0.99), "clip": None})
        ['lr=0.1', 'betas=0.9,0.99', 'clip=None']
    """
    texts = {key: ",".join(map(str, v)) if isinstance(v, (list, tuple)) else str(v) for key, v in settings.items()}
    return [f"{key}={text}" for key, text in texts.items()]


def setting_text(setting: Any) -> str:
    """Write a setting so that it can be compared: as JSON, because a record has lists where a plan has tuples."""
    return setting if isinstance(setting, str) else json.dumps(setting, default=str)


def variant(config: RunConfig) -> str:
    """Return what identifies a run apart from its seed and device; the same for a plan and for its record.

    A record may be older than a setting of its method or task, whose default then is what it was run with.

    Example:
        >>> first, second = (RunConfig("r", "SGD", "sgd", "cpu", seed=seed, epochs=1) for seed in (0, 1))
        >>> variant(first) == variant(second)
        True
        >>> newer = RunConfig("r", "SGD", "sgd", "cpu", seed=0, epochs=1, hyper={"weight_decay": 0.0})
        >>> variant(first) == variant(newer)
        True
    """
    content = [config.label, config.method, config.epochs, complete_settings(config)]
    return json.dumps(content, sort_keys=True, default=str)


def complete_settings(config: RunConfig) -> dict[str, Any]:
    """Return the options and hyperparameters of a run, with today's defaults for those that are newer than it."""
    method, recipe = METHODS.get(config.method), RECIPES.get(config.recipe)
    options = {**(recipe.defaults if recipe else {}), **config.options}
    return {**options, **(method.defaults if method else {}), **config.hyper}


def _reservations(results: Sequence[Result]) -> list[str]:
    """Return what to know before comparing: how the task differs from the paper's, and which methods are not its."""
    shown = [result for result in results if result.values or result.diverged]
    brackets = ", whose figures stand in brackets" if any(result.paper is not None for result in shown) else ""
    tasks = dict.fromkeys(result.differs for result in shown if result.differs)
    methods = grouped([result for result in shown if result.own], lambda result: result.own)
    return [f"Not the paper's setting{brackets}: {text}." for text in tasks] + [
        f"{MARK} Not the paper's method: {', '.join(result.label for result in own)} with {text}."
        for text, own in methods.items()
    ]
