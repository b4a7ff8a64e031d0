"""The general tail: an optimizer's own step with its momentum taken out agrees with the tails that are known."""

import copy
import warnings

import pytest
import torch
from tests.rules.test_tail import CASES, RATE, displacement_by_the_rule

import apo
from apo.rules.momentum import UnknownMomentumError, find_momentum

#: NAdam changes its momentum and RAdam its kind of step as they go along, and a centered RMSprop is refused.
LEFT_OUT = ("nadam", "radam", "radam-that-rectifies-soon", "rmsprop-centered")
KNOWN = {case: CASES[case][:2] for case in CASES if case not in LEFT_OUT}
KNOWN |= {
    "sgd-coupled-decay": ("SGD", {"momentum": 0.9, "weight_decay": 0.3}),
    "adam-coupled-decay": ("Adam", {"weight_decay": 0.3}),
    "adamw-decoupled-decay": ("AdamW", {"weight_decay": 0.3}),
    "adam-slower": ("Adam", {"betas": (0.98, 0.99)}),
}
UNKNOWN = {}  # the same optimizers as classes whose tails apo does not know


def disguised(name):
    """Returns a subclass with a step method, whose tail is not taken to be its parent's."""
    if name not in UNKNOWN:
        parent = getattr(torch.optim, name)
        UNKNOWN[name] = type(f"My{name}", (parent,), {"step": lambda self, closure=None: parent.step(self, closure)})
    return UNKNOWN[name]


def pair(name, options, steps):
    """Returns weights and optimizer twice: as torch's class and as one that is not known."""
    result = []
    for kind in (getattr(torch.optim, name), disguised(name)):
        torch.manual_seed(4)
        weights = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
        optimizer = kind([weights], lr=RATE, **options)
        for _ in range(steps):
            weights.grad = torch.randn_like(weights)
            optimizer.step()
        weights.grad = torch.randn_like(weights)
        result.append((weights, optimizer))
    return result


# The first step of SGD with dampening has none, which only its own tail knows.
FROM_THE_START = [(case, steps) for case in KNOWN for steps in (0, 1, 3, 20) if case != "sgd-dampening" or steps]


@pytest.mark.parametrize(("case", "steps"), FROM_THE_START)
def test_the_general_tail_agrees_with_the_known_one(case, steps):
    known, unknown = (displacement_by_the_rule(*twin) for twin in pair(*KNOWN[case], steps))
    torch.testing.assert_close(unknown, known, rtol=2e-3, atol=1e-9)


def test_the_general_tail_of_muon_has_the_length_of_the_known_one():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    known, unknown = (displacement_by_the_rule(*twin) for twin in pair("Muon", {}, 20))
    cosine = torch.nn.functional.cosine_similarity(known.flatten(), unknown.flatten(), dim=0)
    assert float(cosine) > 0.7
    assert 0.5 < float(torch.linalg.norm(unknown) / torch.linalg.norm(known)) < 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_general_tail_works_in_every_precision(dtype):
    torch.manual_seed(0)
    weights, gradient = torch.nn.Parameter(torch.randn(8, 8).to(dtype)), torch.randn(8, 8).to(dtype)
    optimizer = disguised("SGD")([weights], lr=1e-6, momentum=0.9)
    weights.grad = gradient.clone()
    found = displacement_by_the_rule(weights, optimizer, over_relaxation=1.0)
    torch.testing.assert_close(found, -1e-5 * gradient.float(), rtol=0.02, atol=1e-8)


def test_looking_ahead_leaves_weights_gradients_state_and_random_streams_alone():
    _, (weights, optimizer) = pair("Adam", {}, 3)
    momentum = find_momentum(optimizer)
    before = copy.deepcopy((weights, weights.grad, optimizer.state[weights])), torch.get_rng_state()
    momentum.tails(optimizer)
    after = (weights, weights.grad, optimizer.state[weights]), torch.get_rng_state()
    assert torch.equal(before[1], after[1])
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)


class Skips(torch.optim.Optimizer):
    """Collects statistics in its first step, as ADOPT and SOAP do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"square": p.grad**2, "mean": torch.zeros_like(p)}
                    continue
                state["mean"].lerp_(p.grad / state["square"].sqrt(), 0.1)
                p.sub_(group["lr"] * state["mean"])


def test_an_optimizer_that_skips_its_first_step_has_a_tail_at_once():
    weights = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
    optimizer = Skips([weights], lr=RATE)
    weights.grad = torch.randn_like(weights)
    gradient = weights.grad.clone()
    found = displacement_by_the_rule(weights, optimizer, over_relaxation=1.0)
    torch.testing.assert_close(found, -RATE * gradient.sign(), rtol=1e-3, atol=0)


class Sign(torch.optim.Optimizer):
    """The sign of momentum, as Lion's and Tiger's steps are."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.1)
                p.sub_(group["lr"] * mean.sign())


@pytest.mark.parametrize("flips", [False, True])
def test_a_step_of_fixed_length_looks_further_where_gradients_cancel(flips):
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
    optimizer, gradient = Sign([weights], lr=RATE), torch.randn_like(weights)
    for step in range(200):
        weights.grad = -gradient if flips and step % 2 else gradient.clone()
        optimizer.step()
    weights.grad = gradient.clone()
    found = displacement_by_the_rule(weights, optimizer, over_relaxation=1.0)
    # The mean of gradients that alternate is (1 - beta)/(1 + beta) of them in size.
    size = 19.0 if flips else 1.0
    torch.testing.assert_close(found, -size * RATE * gradient.sign(), rtol=1e-3, atol=0)


class Hidden(torch.optim.Optimizer):
    """Keeps its momentum in an attribute of its own."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.means = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.means[p] = 0.9 * self.means.get(p, 0.0) + p.grad
                p.sub_(group["lr"] * self.means[p])


def test_momentum_that_cannot_be_found_is_warned_of():
    optimizer = Hidden([torch.nn.Parameter(torch.ones(2, 2))], lr=RATE)
    with pytest.raises(UnknownMomentumError):
        find_momentum(optimizer)
    with pytest.warns(apo.ApoWarning, match=r"Hidden has momentum that apo does not know .*apo.register_tail"):
        assert apo.LearningRate(optimizer).look_ahead == "step"


def test_nothing_is_said_if_one_step_ahead_was_asked_for():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apo.LearningRate(Hidden([torch.nn.Parameter(torch.ones(2, 2))], lr=RATE), look_ahead="step")


def test_a_subclass_with_a_step_of_its_own_is_judged_by_what_it_does():
    assert apo.LearningRate(disguised("SGD")([torch.nn.Parameter(torch.ones(2, 2))], lr=RATE)).look_ahead == "step"
    _, (_, optimizer) = pair("SGD", {"momentum": 0.9}, 0)
    assert apo.LearningRate(optimizer).look_ahead == "tail"
