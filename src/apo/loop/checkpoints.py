"""How the few numbers that a tuner has learned survive in files of a plain optimizer.

All of a tuner's state lies under the key ``"apo"`` of ``optimizer.state_dict()``. A plain optimizer that loads such a
file drops the key, because torch keeps only what stands in ``"state"`` and ``"param_groups"``. So a *summary*, a few
numbers, lies in the first param group as well: a tuner that is attached after the file was loaded finds it there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from apo.errors import ApoWarning
from apo.rules.base import Rule

__all__ = ["drop_summary", "has_taken_steps", "put_summary", "take_summary"]

_KEY = "apo"
#: Rules with more meta-parameters than this, which are preconditioners, leave them out of the summary.
_FEW = 1000


def put_summary(rule: Rule, state: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Put a summary of a tuner's state into the param groups that are about to be saved."""
    few = sum(p.numel() for p in rule.phi()) <= _FEW
    groups[0][_KEY] = {
        **{name: state[name] for name in ("steps", "begun", "skipped_meta_updates")},
        "rule": state["rule"] if few else None,
        "fsd_batches": {name: value for name, value in state["fsd_batches"].items() if name != "previous"},
        "rule_name": type(rule).__name__,
        "rates": [float(group["lr"]) for group in groups],
    }


def drop_summary(groups: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Take the summary out of param groups; return it, or None."""
    return groups[0].pop(_KEY, None) if groups else None


def take_summary(rule: Rule) -> dict[str, Any] | None:
    """Take the summary out of the optimizer's groups; return it if it is this rule's and the rates are still its own.

    An optimizer that trained without apo since the file was made has carried it along, but has other rates.
    """
    groups = rule.optimizer.param_groups
    summary = drop_summary(groups)
    if summary is None or summary["rule_name"] != type(rule).__name__ or len(summary["rates"]) != len(groups):
        return None
    pairs = zip(summary["rates"], groups, strict=True)
    same = all(math.isclose(rate, float(group["lr"]), rel_tol=1e-6) for rate, group in pairs)
    return summary if same else None


def has_taken_steps(rule: Rule) -> bool:
    """Return whether the optimizer has taken steps before it was given to a tuner; say that its rate is kept then."""
    optimizer = rule.optimizer
    states = [optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"]]
    # Some optimizers (Adagrad) make their state when they are built, with a count of zero.
    if not any(state and ("step" not in state or state["step"] > 0) for state in states):
        return False
    if getattr(rule, "warm_start", None):
        rates = ", ".join(f"{rate:g}" for rate in rule.rates())
        warnings.warn(
            f"optimizer has taken steps before, so its rate {rates} is kept and no warm start looks for another: "
            "attach to a new optimizer if that rate is not a good one",
            ApoWarning,
            stacklevel=4,
        )
    return True
