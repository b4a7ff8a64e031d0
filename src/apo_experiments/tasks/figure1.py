"""Figure 1: one exact proximal update on one new example of a 1-D regression. Nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apo_experiments.recipe import Setting

#: Options: points of the data, width of the network, how exact the update is.
DEFAULTS: dict[str, Any] = {"data_points": 24, "hidden": 64, "tolerance": 1e-6}


def figure1(
    options: Mapping[str, Any], setting: Setting, hyper: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    r"""Update a fitted network on one example by minimising the proximal objective exactly (equation 3).

    Returns:
        Rows and metrics. A row is a point of the curves, ``x``, ``old`` and ``new`` (predictions before and after the
        update), or a point of the data, ``data_x`` and ``data_y``. The metrics are the example (``example_x``,
        ``example_y``), predictions for it (``example_old``, ``example_new``), its ``example_loss`` after the update,
        and the root mean square change ``change_near`` (within 0.5 of the example) and ``change_far`` (beyond 1.5).
    """
    from apo.reference import one_dimensional_regression

    curves = one_dimensional_regression(
        [(float(hyper["fsd_weight"]), float(hyper["wsd_weight"]))],
        data_points=options["data_points"],
        hidden=options["hidden"],
        tolerance=options["tolerance"],
        seed=setting.seed,
    )
    points = zip(curves.grid.tolist(), curves.old.tolist(), curves.new[0].tolist(), strict=True)
    data = zip(curves.data_inputs.tolist(), curves.data_targets.tolist(), strict=True)
    rows: list[dict[str, Any]] = [{"x": x, "old": old, "new": new} for x, old, new in points]
    rows += [{"data_x": x, "data_y": y} for x, y in data]
    distance, change = (curves.grid - curves.example[0]).abs(), (curves.new[0] - curves.old).square()
    predicted = float(curves.at_example[0])
    return rows, {
        "example_x": curves.example[0],
        "example_y": curves.example[1],
        "example_old": curves.old_at_example,
        "example_new": predicted,
        "example_loss": 0.5 * (predicted - curves.example[1]) ** 2,
        "change_near": float(change[distance <= 0.5].mean().sqrt()),
        "change_far": float(change[distance >= 1.5].mean().sqrt()),
    }
