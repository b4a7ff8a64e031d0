"""Former names of settings, which now have the library's names.

Records keep the settings of their runs, and commands are in scripts and on pages, so the former names are still read:

- ``sigma`` is ``over_relaxation``;
- ``other_batch_share=rising`` is ``total_steps=auto``. As one setting had both meanings, any other value of
  ``other_batch_share`` meant ``total_steps=none`` as well.

The rate of a preconditioner was its ``lr``, and is what it does to the gradient; :func:`rates_of_today` computes it
from the mean of P, which is in the records too.

A run has the same identity under both names, so its folder, its compact record and its study are found again.

The command line reads the former names in the one release that comes after 0.1.0; then :func:`in_words_of_today` can be
deleted. :func:`of_today` and :func:`as_first_named` stay as long as there are records that need them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from apo_experiments.errors import UserError

_NAMES = {"sigma": "over_relaxation"}
_SHARE, _RISING = "other_batch_share", "rising"
_LENGTH, _KNOWN = "total_steps", "auto"


def of_today(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the complete settings of a recorded run under their current names, in the same order.

    Example:
        >>> of_today({"other_batch_share": "rising", "sigma": 2.0})
        {'other_batch_share': None, 'total_steps': 'auto', 'over_relaxation': 2.0}
        >>> of_today({"other_batch_share": 0.5})
        {'other_batch_share': 0.5, 'total_steps': None}
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if key == _SHARE and _LENGTH not in settings:
            rising = value == _RISING
            found |= {_SHARE: None if rising else value, _LENGTH: _KNOWN if rising else None}
        else:
            found[_NAMES.get(key, key)] = value
    return found


def as_first_named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under their first names, by which runs are identified; the inverse of :func:`of_today`.

    Example:
        >>> as_first_named({"other_batch_share": None, "total_steps": "auto", "over_relaxation": 2.0})
        {'other_batch_share': 'rising', 'sigma': 2.0}
        >>> as_first_named({"other_batch_share": 0.5, "total_steps": "auto"})  # there was no name for it
        {'other_batch_share': 0.5, 'total_steps': 'auto'}
    """
    first = {name: former for former, name in _NAMES.items()}
    found = {first.get(key, key): value for key, value in settings.items()}
    if found.get(_LENGTH, "") is None:
        del found[_LENGTH]
        found.setdefault(_SHARE, None)
    elif found.get(_LENGTH) == _KNOWN and found.get(_SHARE) is None:
        del found[_LENGTH]
        found[_SHARE] = _RISING
    return found


def rates_of_today(rows: Sequence[dict[str, Any]], hyper: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a record with the mean step of a preconditioner per unit of gradient as its rate.

    Args:
        rows: The rows; those that have the mean of P but no ``apo/lr`` are from before.
        hyper: The settings of the run.

    Example:
        >>> rates_of_today([{"rate": 1.0, "apo/P/mean": 0.1}], {"scale": 0.9})
        [{'rate': 0.09000000000000001, 'apo/P/mean': 0.1, 'apo/lr': 1.0}]
        >>> rates_of_today([{"rate": 0.1}], {})
        [{'rate': 0.1}]
    """
    return [
        {**row, "rate": hyper.get("scale", 1.0) * row["rate"] * row["apo/P/mean"], "apo/lr": row["rate"]}
        if row.get("apo/P/mean") is not None and row.get("rate") is not None and "apo/lr" not in row
        else row
        for row in rows
    ]


def in_words_of_today(
    settings: Mapping[str, str], grid: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return what ``--set`` and ``--grid`` say under their current names, and a sentence on each change.

    Args:
        settings: The text of each key, such as ``{"lr": "0.1"}``.
        grid: The texts of each key, such as ``{"lr": "0.1,0.03"}``.

    Raises:
        UserError: A setting was given under both of its names, or has no current name.

    Example:
        >>> in_words_of_today({"lr": "0.1", "sigma": "2"}, {})[::2]
        ({'lr': '0.1', 'over_relaxation': '2'}, ['sigma is over_relaxation now: write --set over_relaxation=2.'])
        >>> in_words_of_today({"other_batch_share": "rising"}, {})[0]
        {'other_batch_share': 'none', 'total_steps': 'auto'}
        >>> in_words_of_today({}, {"other_batch_share": "rising,none"})[1]
        {'total_steps': 'auto,none'}
    """
    words, axes, given, sentences = dict(settings), dict(grid), {*settings, *grid}, []
    for former, name in _NAMES.items():
        for option, pairs in (("--set", words), ("--grid", axes)):
            if former in pairs:
                if name in given:
                    raise UserError(f"{former} is {name} now, and both were given: leave {former} out.")
                pairs[name] = pairs.pop(former)
                sentences.append(f"{former} is {name} now: write {option} {name}={pairs[name]}.")
    if _LENGTH in given or _SHARE not in given:
        return words, axes, sentences
    values = [value.strip().lower() for value in {**words, **axes}[_SHARE].split(",")]
    if _RISING not in values:
        words[_LENGTH] = "none"
        sentences.append(
            f"{_SHARE} without {_LENGTH} is read as {_LENGTH}=none too, as before: write --set {_LENGTH}=none, or "
            f"{_LENGTH}={_KNOWN} for a share that rises towards the end of the run."
        )
        return words, axes, sentences
    if _SHARE in axes:
        for other in {*values} - {_RISING, "none"}:
            raise UserError(
                f"{_SHARE}={_RISING} is {_LENGTH}={_KNOWN} now, so one axis cannot have {_RISING} and {other}: give "
                f"two commands, with --grid {_SHARE}=... and with --set {_LENGTH}={_KNOWN}."
            )
        del axes[_SHARE]
        axes[_LENGTH] = ",".join(_KNOWN if value == _RISING else value for value in values)
        today = f"--grid {_LENGTH}={axes[_LENGTH]}"
    else:
        words |= {_SHARE: "none", _LENGTH: _KNOWN}
        today = f"--set {_LENGTH}={_KNOWN}"
    sentences.append(f"{_SHARE}={_RISING} is {_LENGTH}={_KNOWN} now: write {today}.")
    return words, axes, sentences
