"""Hyperparameters from the command line, from JSON and from grids become what the defaults are."""

from __future__ import annotations

import json

import pytest

import apo_experiments.methods as methods
from apo_experiments.errors import UserError
from apo_experiments.method import Method
from apo_experiments.methods.hyper import filled

METHOD = Method(
    "toy",
    "for tests",
    lambda problem, hyper, budget: None,  # type: ignore[arg-type,return-value]
    {"lr": 0.1, "interval": 10, "nesterov": False, "betas": (0.9, 0.999), "clip": None, "schedule": "fixed"},
)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("lr", "0.1", 0.1),
        ("lr", "1e-3", 1e-3),
        ("lr", 1, 1.0),
        ("interval", "20", 20),
        ("interval", 20.0, 20),
        ("nesterov", "true", True),
        ("nesterov", "No", False),
        ("nesterov", True, True),
        ("betas", "0.9,0.98", (0.9, 0.98)),
        ("betas", [0.9, 0.98], (0.9, 0.98)),
        ("betas", "0.5", (0.5,)),
        ("clip", "none", None),
        ("clip", "0.5", 0.5),
        ("clip", "3", 3),
        ("clip", "true", True),
        ("clip", "previous", "previous"),
        ("clip", 2.0, 2.0),
        ("schedule", "cosine", "cosine"),
        ("schedule", "none", "none"),
    ],
)
def test_value_takes_the_type_of_the_default(name, given, expected):
    value = filled(METHOD.defaults, {name: given})[name]
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("lr", "fast"),
        ("lr", "none"),
        ("lr", True),
        ("interval", "1.5"),
        ("interval", 1.5),
        ("nesterov", "maybe"),
        ("nesterov", 2),
        ("betas", "a,b"),
        ("schedule", 3),
        ("schedule", None),
    ],
)
def test_value_of_another_type_is_refused_by_name(name, given):
    with pytest.raises(UserError, match=rf"^{name} was"):
        filled(METHOD.defaults, {name: given})


def test_defaults_are_copied_not_shared():
    filled(METHOD.defaults, {})["lr"] = 7.0
    assert METHOD.defaults["lr"] == 0.1


@pytest.mark.parametrize("name", list(methods.METHODS))
def test_complete_hyperparameters_survive_json(name):
    method = methods.METHODS[name]
    hyper = filled(method.defaults, {})
    assert filled(method.defaults, json.loads(json.dumps(hyper))) == hyper


@pytest.mark.parametrize("name", list(methods.METHODS))
def test_defaults_given_as_strings_read_as_themselves(name):
    method = methods.METHODS[name]
    for key, value in method.defaults.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        assert filled(method.defaults, {key: text})[key] == value
