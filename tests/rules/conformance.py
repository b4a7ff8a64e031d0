"""What every update rule must be, whatever it learns.

A rule's test derives from `RuleSuite` and says how to build one. Everything is checked in float64, by driving the rule
through a meta-iteration by hand, in the order that `apo.rules.base` states.
"""

from __future__ import annotations

import copy
import io
from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest
import torch
from tests.core import networks
from tests.core.scripted import Scripted, move_phi
from torch import Tensor, nn
from torch.nn import functional as F

import apo
from apo.rules import Proposal, Rule
from apo.rules.base import Outcome

NETWORK = "norm-and-dropout"
BATCHES = networks.batches(NETWORK, 6)


def fill_gradients(model: nn.Module, index: int) -> None:
    x, y = BATCHES[index]
    model.zero_grad()
    torch.manual_seed(index)
    F.cross_entropy(model(x), y).backward()


def ordinary_step(rule: Rule, model: nn.Module, index: int) -> None:
    fill_gradients(model, index)
    rule.before_step()
    rule.optimizer.step()


def open_iteration(rule: Rule, model: nn.Module, index: int) -> Proposal:
    """Takes a meta-iteration to the point at which the weights are back at theta."""
    fill_gradients(model, index)
    theta = {p: p.detach().clone() for p in model.parameters()}
    rule.before_step()
    with rule.measuring():
        rule.optimizer.step()
    proposal = rule.propose(theta)
    with torch.no_grad():
        for p, value in theta.items():
            p.copy_(value)
    return proposal


def values(tensors) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def assert_equal(found, expected) -> None:
    found, expected = list(found), list(expected)
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def assert_close(found, expected, rtol=1e-11, atol=1e-13) -> None:
    torch.testing.assert_close(values(found), values(expected), rtol=rtol, atol=atol)


class RuleSuite(ABC):
    """The suite; `make` builds the rule on a model, with a given meta-optimizer."""

    @abstractmethod
    def make(self, model: nn.Module, meta_optimizer: Callable) -> Rule: ...

    def start(self, meta_optimizer: Callable = Scripted, steps: int = 2) -> tuple[nn.Module, Rule]:
        """Returns a model and a rule that has taken a few ordinary steps, so that its state is not empty."""
        model = networks.build(NETWORK)
        rule = self.make(model, meta_optimizer)
        for index in range(steps):
            ordinary_step(rule, model, index)
        return model, rule

    def directions(self, rule: Rule) -> list[Tensor]:
        torch.manual_seed(9)
        return [torch.randn_like(p) for p in rule.phi()]

    def test_phi_are_leaves_of_the_meta_optimizer_and_stay_the_same_objects(self):
        model, rule = self.start()
        phi = rule.phi()
        assert phi and all(p.is_leaf and p.grad_fn is None for p in phi)
        held = [p for group in rule.meta_optimizer.param_groups for p in group["params"]]
        assert all(a is b for a, b in zip(held, phi, strict=True))
        open_iteration(rule, model, 2).take_step()
        move_phi(rule, self.directions(rule))
        assert all(a is b for a, b in zip(rule.phi(), phi, strict=True))

    def test_phi_moves_in_the_meta_update_and_nowhere_else(self):
        model, rule = self.start(steps=0)
        phi = values(rule.phi())
        ordinary_step(rule, model, 0)
        proposal = open_iteration(rule, model, 1)
        proposal.pull_back([torch.randn_like(d) for d in proposal.displacement()])
        proposal.take_step()
        rule.after(Outcome(0, 1.0, 0.5))
        assert_equal(rule.phi(), phi)
        rule.meta_optimizer.nudge = [torch.full_like(p, 1e-3) for p in phi]
        rule.meta_update([torch.zeros_like(p) for p in phi])
        assert_close(rule.phi(), [p + 1e-3 for p in phi])

    def test_meta_update_hands_the_gradients_to_the_meta_optimizer_and_leaves_none_behind(self):
        model, rule = self.start()
        gradients = self.directions(rule)
        open_iteration(rule, model, 2)
        rule.meta_update(gradients)
        assert_equal(rule.meta_optimizer.seen[-1], gradients)
        assert all(p.grad is None for p in rule.phi())

    def test_displacement_is_aligned_with_what_moves(self):
        model, rule = self.start()
        proposal = open_iteration(rule, model, 2)
        displacement = proposal.displacement()
        assert [d.shape for d in displacement] == [p.shape for p in proposal.parameters]
        assert {id(p) for p in proposal.parameters} == {id(p) for p in model.parameters()}
        assert len(proposal.coupled_decay) == len(displacement)

    def test_only_parameters_with_a_gradient_move(self):
        model, rule = self.start()
        fill_gradients(model, 2)
        idle = next(iter(model.parameters()))
        idle.grad = None
        before = {p: p.detach().clone() for p in model.parameters()}
        rule.before_step()
        with rule.measuring():
            rule.optimizer.step()
        proposal = rule.propose(before)
        assert idle not in set(proposal.parameters)
        assert len(proposal.displacement()) == len(proposal.parameters) == len(before) - 1

    def test_pull_back_is_the_derivative_of_the_displacement(self):
        model, rule = self.start()
        direction, small = self.directions(rule), 1e-6

        def displacement(change):
            twin_model, twin = copy.deepcopy((model, rule))
            move_phi(twin, [change * d for d in direction])
            return open_iteration(twin, twin_model, 2).displacement()

        ahead, behind = displacement(small), displacement(-small)
        slope = [(a - b) / (2 * small) for a, b in zip(ahead, behind, strict=True)]
        proposal = open_iteration(rule, model, 2)
        cotangent = [torch.randn_like(d) for d in proposal.displacement()]
        pulled = proposal.pull_back(cotangent)
        assert [g.numel() for g in pulled] == [p.numel() for p in rule.phi()]
        found = sum((g.reshape(d.shape) * d).sum() for g, d in zip(pulled, direction, strict=True))
        expected = sum((c * s).sum() for c, s in zip(cotangent, slope, strict=True))
        assert abs(expected) > 1e-6
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-10)

    def test_with_phi_unchanged_the_step_is_the_optimizers_own(self):
        model, rule = self.start()
        twin_model, twin = copy.deepcopy((model, rule))
        ordinary_step(twin, twin_model, 2)
        open_iteration(rule, model, 2).take_step()
        assert_close(model.parameters(), twin_model.parameters())
        ordinary_step(twin, twin_model, 3)  # and the optimizer's state was left as its own step leaves it
        ordinary_step(rule, model, 3)
        assert_close(model.parameters(), twin_model.parameters())

    def test_with_phi_moved_the_step_is_that_of_an_optimizer_which_had_it_before(self):
        model, rule = self.start()
        twin_model, twin = copy.deepcopy((model, rule))
        changes = [0.05 * d for d in self.directions(rule)]
        move_phi(twin, changes)
        ordinary_step(twin, twin_model, 2)
        proposal = open_iteration(rule, model, 2)
        before = values(model.parameters())
        move_phi(rule, changes)
        proposal.take_step()
        assert_close(model.parameters(), twin_model.parameters())
        assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))

    def test_rates_are_what_the_param_groups_show_before_during_and_after(self):
        model, rule = self.start()
        shown = lambda: tuple(float(group["lr"]) for group in rule.optimizer.param_groups)  # noqa: E731
        start = rule.rates()
        proposal = open_iteration(rule, model, 2)
        assert rule.rates() == shown() == start
        move_phi(rule, [0.1 * d for d in self.directions(rule)])
        proposal.take_step()
        assert rule.rates() == shown()

    def test_a_broken_off_iteration_leaves_rates_and_the_next_step(self):
        model, rule = self.start()
        twin_model, twin = copy.deepcopy((model, rule))
        rates = rule.rates()
        rule.before_step()
        with pytest.raises(KeyboardInterrupt), rule.measuring():
            raise KeyboardInterrupt
        assert rule.rates() == rates
        ordinary_step(twin, twin_model, 2)
        ordinary_step(rule, model, 2)
        assert_equal(model.parameters(), twin_model.parameters())

    def test_state_survives_a_file_and_a_fresh_rule_goes_on_bit_for_bit(self):
        adam = lambda phi: torch.optim.Adam(phi, lr=0.01)  # noqa: E731
        model, rule = self.start(adam)
        self.meta_iterations(model, rule, [2, 3])
        file = io.BytesIO()
        torch.save([rule.state_dict(), rule.optimizer.state_dict(), model.state_dict()], file)
        other_model = networks.build(NETWORK)
        other = self.make(other_model, adam)
        file.seek(0)
        state, optimizer, weights = torch.load(file, weights_only=True)
        other_model.load_state_dict(weights)
        other.optimizer.load_state_dict(optimizer)
        other.load_state_dict(state)
        assert_equal(other.phi(), rule.phi())
        assert other.rates() == rule.rates()
        self.meta_iterations(model, rule, [4, 5])
        self.meta_iterations(other_model, other, [4, 5])
        assert_equal(other.phi(), rule.phi())
        assert_equal(other_model.parameters(), model.parameters())

    def test_detached_the_optimizer_goes_on_as_an_ordinary_one(self):
        model, rule = self.start()
        move_phi(rule, [0.1 * d for d in self.directions(rule)])
        twin_model, twin = copy.deepcopy((model, rule))
        rates = rule.rates()
        rule.detach()
        assert all(type(group) is dict for group in rule.optimizer.param_groups)
        assert tuple(group["lr"] for group in rule.optimizer.param_groups) == rates
        fill_gradients(model, 2)
        rule.optimizer.step()
        ordinary_step(twin, twin_model, 2)
        assert_equal(model.parameters(), twin_model.parameters())

    def test_the_rule_learns_inside_a_tuner(self):
        model = networks.build(NETWORK).eval()  # no dropout: the loss has to fall, not to fall on average
        rule = self.make(model, lambda phi: torch.optim.Adam(phi, lr=0.02))
        phi = values(rule.phi())
        tuner = apo.APO(rule, model, criterion=F.cross_entropy, interval=1)
        losses = [float(tuner.step(*BATCHES[index % 2])) for index in range(60)]
        assert sum(losses[-10:]) < sum(losses[:10])
        assert not any(torch.equal(p, q) for p, q in zip(rule.phi(), phi, strict=True))
        assert all(torch.isfinite(torch.tensor(list(record.scalars().values()))).all() for record in tuner.history)

    def meta_iterations(self, model: nn.Module, rule: Rule, indices: list[int]) -> None:
        for index in indices:
            proposal = open_iteration(rule, model, index)
            rule.meta_update(proposal.pull_back([torch.ones_like(d) for d in proposal.displacement()]))
            proposal.take_step()
