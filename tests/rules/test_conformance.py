"""Each rule of the library passes the suite that a custom rule has to pass."""

import torch
from tests.rules.conformance import RuleSuite

import apo


def two_groups(model):
    parameters = list(model.parameters())
    return [{"params": parameters[:2], "lr": 0.03, "weight_decay": 0.1}, {"params": parameters[2:]}]


class TestLearningRateOfMomentum(RuleSuite):
    def make(self, model, meta_optimizer):
        optimizer = torch.optim.SGD(two_groups(model), lr=0.05, momentum=0.9)
        return apo.LearningRate(optimizer, meta_optimizer=meta_optimizer, max_change=None, warm_start=False)


class TestLearningRateOfAdamWPerGroup(RuleSuite):
    def make(self, model, meta_optimizer):
        optimizer = torch.optim.AdamW(two_groups(model), lr=0.01)
        return apo.LearningRate(
            optimizer, meta_optimizer=meta_optimizer, max_change=None, per_group=True, warm_start=False
        )


class TestLearningRateAsInThePaper(RuleSuite):
    def make(self, model, meta_optimizer):
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.003)
        return apo.LearningRate.paper(optimizer, meta_optimizer=meta_optimizer)


class TestRateAndMomentum(RuleSuite):
    def make(self, model, meta_optimizer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8, weight_decay=0.1)
        return apo.RateAndMomentum(optimizer, meta_optimizer=meta_optimizer)


class PreconditionedSuite(RuleSuite):
    structure = apo.Kronecker

    def make(self, model, meta_optimizer):
        optimizer = type(self).structure(model, lr=0.05, weight_decay=0.1, momentum=0.5)
        torch.manual_seed(3)
        for layer in optimizer.layers:
            for factor in layer.block.factors.values():
                factor.add_(0.1 * torch.randn_like(factor))
        return apo.Preconditioned(optimizer, meta_optimizer=meta_optimizer)


class TestKronecker(PreconditionedSuite):
    pass


class TestDiagonal(PreconditionedSuite):
    structure = apo.Diagonal


class TestFull(PreconditionedSuite):
    structure = apo.Full


class TestEigenbasis(PreconditionedSuite):
    structure = apo.Eigenbasis
