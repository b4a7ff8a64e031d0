"""The tutorial's rule keeps the contract of `apo.Rule`, and the tutorial shows the code that is tested here."""

from __future__ import annotations

import copy
import importlib
import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

import apo

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tutorial(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("custom_rule")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def layerwise(tutorial, model, rate: float = 0.1):
    groups = [{"params": layer.parameters()} for layer in model if isinstance(layer, nn.Linear)]
    return tutorial.LayerwiseRate(torch.optim.RMSprop(groups, lr=rate))


def measured_proposal(rule, model):
    """Take the optimizer's step as a meta-iteration does, and return the proposal with the weights back at theta."""
    nn.functional.cross_entropy(model(torch.randn(6, 4).double()), torch.randint(3, (6,))).backward()
    theta = {p: p.detach().clone() for p in model.parameters()}
    with rule.measuring():
        rule.optimizer.step()
    proposal = rule.propose(theta)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(theta[p])
    return proposal


def test_pull_back_is_the_derivative_of_the_displacement(tutorial):
    model = network()
    rule = layerwise(tutorial, model)
    with torch.no_grad():
        rule.phi()[1].fill_(-0.3)
    proposal = measured_proposal(rule, model)
    cotangent = [torch.randn_like(p) for p in proposal.parameters]

    def value() -> float:
        return sum(float((h * d).sum()) for h, d in zip(cotangent, proposal.displacement(), strict=True))

    for parameter, gradient in zip(rule.phi(), proposal.pull_back(cotangent), strict=True):
        differences = []
        for sign in (1, -1):
            parameter.add_(sign * 1e-6)
            differences.append(sign * value())
            parameter.sub_(sign * 1e-6)
        assert float(gradient) == pytest.approx(sum(differences) / 2e-6, rel=1e-7)


def test_step_with_unchanged_phi_is_the_optimizers_own(tutorial):
    model, twin = network(), network()
    twin.load_state_dict(model.state_dict())
    rule = layerwise(tutorial, model)
    torch.manual_seed(1)
    measured_proposal(rule, model).take_step()
    torch.manual_seed(1)
    nn.functional.cross_entropy(twin(torch.randn(6, 4).double()), torch.randint(3, (6,))).backward()
    torch.optim.RMSprop(twin.parameters(), lr=0.1).step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_rates_in_force_follow_eta_and_gamma_and_survive_a_checkpoint(tutorial):
    x, y = torch.randn(32, 4).double(), torch.randint(3, (32,))

    def tuner_of(model) -> apo.APO:
        return apo.APO(layerwise(tutorial, model, 1e-3), model, criterion=nn.functional.cross_entropy, interval=2)

    first = tuner_of(network())
    for _ in range(6):
        first.step(x, y)
    rates = first.rule.layer_rates()
    assert rates == list(first.rule.rates()) and len(set(rates)) == 3
    assert rates[0] / rates[1] == pytest.approx(rates[1] / rates[2])
    second = tuner_of(network())
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # torch shares the tensors otherwise
    for tuner in (first, second):
        tuner.step(x, y)
    for ours, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_tutorial_shows_this_code_and_the_rule_takes_under_a_hundred_lines(tutorial):
    page = (ROOT / "docs" / "custom-rule.md").read_text()
    sources = [inspect.getsource(thing).strip() for thing in (tutorial.LayerwiseRate, tutorial.LayerwiseProposal)]
    assert all(source in page for source in sources)
    assert sum(len(source.splitlines()) for source in sources) < 100
