"""What of a tuner goes into files, and how it comes back.

All of it lies under the key ``"apo"`` of ``optimizer.state_dict()``. A plain optimizer that loads such a file drops the
key, because torch keeps only what stands in ``"state"`` and ``"param_groups"``. So a *summary*, a few numbers, lies in
the first param group as well: a tuner that is attached after the file was loaded finds it there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from apo.errors import ApoWarning

if TYPE_CHECKING:
    from apo.loop.tuner import Tuner

__all__ = ["continue_from_earlier_steps", "drop_summary", "load_own_state", "own_state", "put_summary", "take_summary"]

_KEY = "apo"
#: Rules with more meta-parameters than this, which are preconditioners, leave them out of the summary.
_FEW = 1000


def own_state(tuner: Tuner, with_batch: bool) -> dict[str, Any]:
    """Return all that a tuner needs to continue, beside the optimizer's own state and the random streams."""
    return {
        "steps": tuner.steps,
        "begun": tuner.begun,
        "skipped_meta_updates": tuner.skipped_meta_updates,
        "skipped_steps": tuner.skipped_steps,
        "rule": tuner.rule.state_dict(),
        "fsd_batches": tuner.fsd_batches.state_dict(with_batch=with_batch),
        "history": tuner.history.state_dict(),
    }


def load_own_state(tuner: Tuner, state: Mapping[str, Any]) -> None:
    """Restore what :func:`own_state` returned, or a summary of it."""
    tuner.steps = int(state["steps"])
    tuner.begun = bool(state.get("begun", tuner.steps > 0))  # files of 0.1.0 do not have it
    tuner.skipped_meta_updates = int(state["skipped_meta_updates"])
    tuner.skipped_steps = int(state.get("skipped_steps", 0))
    tuner.rule.load_state_dict(state["rule"])
    tuner.fsd_batches.load_state_dict(state["fsd_batches"], tuner.device)
    tuner.history.load_state_dict(state.get("history", []))


def put_summary(tuner: Tuner, state: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Put a summary of the tuner's state into the param groups that are about to be saved."""
    few = sum(p.numel() for p in tuner.rule.phi()) <= _FEW
    groups[0][_KEY] = {
        **{name: state[name] for name in ("steps", "begun", "skipped_meta_updates")},
        "rule": state["rule"] if few else None,
        "fsd_batches": {name: value for name, value in state["fsd_batches"].items() if name != "previous"},
        "rule_name": type(tuner.rule).__name__,
        "rates": [float(group["lr"]) for group in groups],
    }


def drop_summary(groups: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Take the summary out of param groups; return it, or None."""
    return groups[0].pop(_KEY, None) if groups else None


def take_summary(tuner: Tuner) -> dict[str, Any] | None:
    """Take the summary out of the optimizer's groups; return it if it is this rule's and the rates are still its own.

    An optimizer that trained without apo since the file was made has carried it along, but has other rates.
    """
    groups = tuner.optimizer.param_groups
    summary = drop_summary(groups)
    if summary is None or summary["rule_name"] != type(tuner.rule).__name__ or len(summary["rates"]) != len(groups):
        return None
    pairs = zip(summary["rates"], groups, strict=True)
    same = all(math.isclose(rate, float(group["lr"]), rel_tol=1e-6) for rate, group in pairs)
    return summary if same else None


def continue_from_earlier_steps(tuner: Tuner) -> None:
    """Continue where the optimizer is, if it has loaded a file or taken steps before it was given to a tuner."""
    summary = take_summary(tuner)
    if summary is not None:
        load_own_state(tuner, summary)
        return
    optimizer = tuner.optimizer
    states = [optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"]]
    # Some optimizers (Adagrad) make their state when they are built, with a count of zero.
    if not any(state and ("step" not in state or state["step"] > 0) for state in states):
        return
    tuner.begun = True
    if getattr(tuner.rule, "warm_start", None):
        rates = ", ".join(f"{rate:g}" for rate in tuner.rule.rates())
        warnings.warn(
            f"optimizer has taken steps before, so its rate {rates} is kept and no warm start looks for another: "
            "attach to a new optimizer if that rate is not a good one",
            ApoWarning,
            stacklevel=4,
        )
