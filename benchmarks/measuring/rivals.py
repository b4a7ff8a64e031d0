r"""Other ways to the meta-gradient of the learning-rate rule, and the least that any way can cost.

All of them learn :math:`\log\eta` of SGD with momentum from the look-ahead of :class:`apo.LearningRate` with its
defaults, :math:`\theta - \eta / (\sigma (1 - \mu))\, g`, on the same batches; a test holds their meta-gradients against
each other. They are written as lean as they can be: no records, no checks, no protection against anything.
"""

from __future__ import annotations

import importlib.util
import math
from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import apo
from apo.reference import unrolled_meta_gradient, updates

from .contenders import LEARNING_RATE, MOMENTUM, Contender, sgd
from .workloads import Batch

FSD_WEIGHT = apo.LearningRate.fsd_weight
OVER_RELAXATION = 1.4
DISCREPANCY = apo.CategoricalKL()

HAS_TORCHOPT = importlib.util.find_spec("torchopt") is not None


class RateRival(Contender):
    """Trains with SGD; every ``interval`` steps it asks a subclass for the meta-gradient and moves the rate."""

    def __init__(self, model: nn.Module, interval: int) -> None:
        super().__init__(model, interval)
        self.optimizer = sgd(model)
        self.log_rate = torch.tensor(math.log(LEARNING_RATE), requires_grad=True)
        self.meta_optimizer = torch.optim.Adam([self.log_rate], lr=0.1, betas=(0.0, 0.99))
        self.steps = 0
        self.previous: Batch | None = None

    def step(self, inputs: Tensor, target: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(inputs), target).backward()
        if self.steps % self.interval == 0:
            self.log_rate.grad = self.meta_gradient((inputs, target), self.previous or (inputs, target))
            self._move_rate()
        self.optimizer.step()
        self.previous = (inputs, target)
        self.steps += 1

    @abstractmethod
    def meta_gradient(self, batch: Batch, fsd_batch: Batch) -> Tensor:
        """Return dQ / d log eta; the gradient of the batch is in the parameters' ``.grad``."""

    def look_ahead_rate(self, log_rate: Tensor) -> Tensor:
        """Return the factor of the gradient in the look-ahead."""
        return log_rate.exp() / (OVER_RELAXATION * (1 - MOMENTUM))

    @torch.no_grad()
    def _move_rate(self) -> None:
        before = float(self.log_rate)
        self.meta_optimizer.step()
        self.log_rate.clamp_(before - 0.2, before + 0.2)
        self.optimizer.param_groups[0]["lr"] = math.exp(float(self.log_rate))


class Floor(RateRival):
    """The passes that a meta-step cannot do without, and nothing else: no meta-gradient comes of it.

    In theory they cost 7/3 of a training step. What they cost on a machine depends on its backward passes.
    """

    def meta_gradient(self, batch: Batch, fsd_batch: Batch) -> Tensor:
        gradients = [p.grad for p in self.model.parameters()]
        with torch.no_grad():
            old = self.model(fsd_batch[0])
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(batch[0]), batch[1]).backward()
        (FSD_WEIGHT * DISCREPANCY(self.model(fsd_batch[0]), old)).backward()
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        return torch.zeros(())


class Unrolled(RateRival):
    """The paper's own way: autograd through the step and the network, by :mod:`apo.reference`."""

    def meta_gradient(self, batch: Batch, fsd_batch: Batch) -> Tensor:
        parameters = dict(self.model.named_parameters())

        def look_ahead(theta: dict[str, Tensor], phi: dict[str, Tensor]) -> dict[str, Tensor]:
            rate = self.look_ahead_rate(phi["log_rate"])
            return {name: updates.sgd(theta[name], parameters[name].grad, {}, lr=rate) for name in theta}

        _, gradients = unrolled_meta_gradient(
            self.model,
            look_ahead,
            {"log_rate": self.log_rate},
            theta=parameters,
            loss=F.cross_entropy,
            batch=batch,
            fsd_batch=fsd_batch,
            discrepancy=DISCREPANCY,
            fsd_weight=FSD_WEIGHT,
            wsd_weight=0.0,
        )
        return gradients["log_rate"]


class TorchOpt(RateRival):
    """The same graph built by TorchOpt's differentiable SGD.

    TorchOpt 0.7.3 and higher 0.2.1 both run on torch 2.13 and agree; TorchOpt is the one that is still maintained, and
    its functional form is the leanest of the three ways they offer: ``torchopt.MetaSGD`` and higher's optimizers also
    build the graph of the gradient itself, which a learning rate has no use for.
    """

    def meta_gradient(self, batch: Batch, fsd_batch: Batch) -> Tensor:
        import torchopt

        names = [name for name, _ in self.model.named_parameters()]
        theta = tuple(p.detach() for p in self.model.parameters())
        gradients = tuple(p.grad for p in self.model.parameters())
        optimizer = torchopt.sgd(lr=self.look_ahead_rate(self.log_rate))
        steps, _ = optimizer.update(gradients, optimizer.init(theta), params=theta, inplace=False)
        ahead = dict(zip(names, torchopt.apply_updates(theta, steps, inplace=False), strict=True))
        with torch.no_grad():
            old = self._forward({}, fsd_batch[0])
        loss = F.cross_entropy(self._forward(ahead, batch[0]), batch[1])
        fsd = DISCREPANCY(self._forward(ahead, fsd_batch[0]), old)
        return torch.autograd.grad(loss + FSD_WEIGHT * fsd, self.log_rate)[0]

    def _forward(self, parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        # Cloned buffers take BatchNorm's in-place updates.
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        return functional_call(self.model, {**buffers, **parameters}, (inputs,))
