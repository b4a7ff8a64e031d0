"""The meta-gradient of a whole meta-step is the slope of the objective that the same meta-step records."""

import copy
import functools

import pytest
import torch
from tests.core import networks
from tests.core.scripted import Scripted, meta_gradients, move_phi
from tests.preconditioners.conformance import randomised
from torch.nn import functional as F

import apo

NETWORK = "norm-and-dropout"


def rate_rule(model, optimizer=torch.optim.SGD, options=None, **rule_options):
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": 0.03}, {"params": parameters[2:]}]
    settings = {"warm_start": False, "meta_optimizer": Scripted, "max_change": None}
    return apo.LearningRate(optimizer(groups, lr=0.02, **(options or {})), **(settings | rule_options))


def preconditioned_rule(model, structure=apo.Kronecker, **options):
    optimizer = structure(model, lr=0.05, weight_decay=0.1, **options)
    for layer in optimizer.layers:
        randomised(layer.block)
    return apo.Preconditioned(optimizer, meta_optimizer=Scripted)


def momentum_rule(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8, weight_decay=0.1)
    return apo.RateAndMomentum(optimizer, meta_optimizer=Scripted)


sgd_options = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
RULES = {
    "step": functools.partial(rate_rule, options=sgd_options, look_ahead="step", over_relaxation=1.0),
    "tail": functools.partial(rate_rule, options=sgd_options, over_relaxation=1.0),
    "tail-over-relaxed": functools.partial(rate_rule, options=sgd_options, over_relaxation=2.5),
    "tail-per-group": functools.partial(rate_rule, options=sgd_options, per_group=True),
    "tail-adam": functools.partial(rate_rule, optimizer=torch.optim.Adam, options={"weight_decay": 0.1}),
    "tail-adamw": functools.partial(rate_rule, optimizer=torch.optim.AdamW, options={"weight_decay": 0.1}),
    "tail-nadam": functools.partial(rate_rule, optimizer=torch.optim.NAdam, per_group=True),
    "tail-rmsprop": functools.partial(rate_rule, optimizer=torch.optim.RMSprop, options={"momentum": 0.5}),
    "tail-adamax": functools.partial(rate_rule, optimizer=torch.optim.Adamax),
    "fallback-adagrad": functools.partial(rate_rule, optimizer=torch.optim.Adagrad),
    "kronecker": preconditioned_rule,
    "diagonal": functools.partial(preconditioned_rule, structure=apo.Diagonal),
    "full": functools.partial(preconditioned_rule, structure=apo.Full),
    "rate-and-momentum": momentum_rule,
}


def objective_after(tuner, changes, batch):
    """Returns Q as a copy of the tuner records it at its next meta-step, with phi moved by `changes` before."""
    twin, state = copy.deepcopy(tuner), torch.get_rng_state()
    move_phi(twin.rule, changes)
    twin.step(*batch)
    torch.set_rng_state(state)
    return twin.history[-1].objective


@pytest.mark.parametrize("name", RULES)
def test_meta_gradient_is_the_central_difference_of_the_recorded_objective(name):
    model, batches = networks.build(NETWORK), networks.batches(NETWORK, 4)
    rule = RULES[name](model)
    tuner = apo.APO(rule, model, criterion=F.cross_entropy, fsd_weight=0.4, wsd_weight=0.1, interval=3)
    for x, y in batches[:3]:
        tuner.step(x, y)
    torch.manual_seed(7)
    directions = [[torch.randn_like(p) for p in rule.phi()] for _ in range(3)]
    if len(rule.phi()) > 1:  # each phi alone as well, so that no error hides in a sum
        directions += [[d if i == j else 0 * d for j, d in enumerate(directions[0])] for i in range(len(rule.phi()))]
    small = 1e-5
    slopes = [
        (
            objective_after(tuner, [small * d for d in direction], batches[3])
            - objective_after(tuner, [-small * d for d in direction], batches[3])
        )
        / (2 * small)
        for direction in directions
    ]
    tuner.step(*batches[3])
    gradients = meta_gradients(rule)
    found = [sum((g * d).sum() for g, d in zip(gradients, direction, strict=True)).item() for direction in directions]
    assert max(map(abs, found)) > 1e-4
    torch.testing.assert_close(torch.tensor(found), torch.tensor(slopes), rtol=1e-6, atol=1e-8)
