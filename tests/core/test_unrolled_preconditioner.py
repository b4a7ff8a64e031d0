"""The engine's meta-gradient of preconditioners, and of rate and momentum, is the one of the unrolled graph."""

import pytest
import torch
from tests.core import networks, unrolled_twin
from tests.core.scripted import Scripted
from tests.preconditioners.conformance import randomised
from torch.nn import functional as F

import apo
from apo.reference import updates

STRUCTURES = {
    "full": apo.Full,
    "diagonal": apo.Diagonal,
    "kronecker-matrix": apo.Kronecker,
    "kronecker-factored": lambda *args, **options: apo.Kronecker(*args, conv="factored", **options),
    "kronecker-short": lambda *args, **options: apo.Kronecker(*args, max_dim=5, **options),
    "eigenbasis": apo.Eigenbasis,
    "eigenbasis-factored": lambda *args, **options: apo.Eigenbasis(*args, conv="factored", **options),
    "eigenbasis-short": lambda *args, **options: apo.Eigenbasis(*args, max_dim=5, **options),
}


def named_factors(optimizer):
    return {f"{layer.name}/{key}": factor for layer in optimizer.layers for key, factor in layer.block.factors.items()}


def make_update(decay):
    """Unrolls theta - P(phi) g, with P as a dense matrix for each layer."""

    def build(model, optimizer, gradient):
        names = {p: name for name, p in model.named_parameters()}

        def step(theta, phi):
            moved = dict(theta)
            for layer in optimizer.layers:
                layer.block.factors = {key: phi[f"{layer.name}/{key}"] for key in layer.block.factors}
                parts = [gradient[names[p]] + decay * theta[names[p]] for p in layer.params]
                vector = layer.view.gather(parts).reshape(-1)
                product = (optimizer.dense_preconditioner(layer.name) @ vector).reshape(layer.view.shape)
                for p, part in zip(layer.params, layer.view.scatter(product), strict=True):
                    moved[names[p]] = theta[names[p]] - part
            return moved

        return step

    return build


@pytest.mark.parametrize("decay", [0.0, 0.1], ids=["plain", "decay"])
@pytest.mark.parametrize("network", ["norm-and-dropout", "convolutions", "embeddings"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_meta_gradient_and_terms_are_those_of_the_unrolled_graph(structure, network, decay):
    model = networks.build(network)
    optimizer = STRUCTURES[structure](model, lr=0.05, weight_decay=decay, momentum=0.5)
    for layer in optimizer.layers:
        randomised(layer.block)
    rule = apo.Preconditioned(optimizer, meta_optimizer=Scripted)
    options = {"fsd_weight": 0.3, "wsd_weight": 0.2, "other_batch_share": 0.0, "interval": 3}
    tuner = apo.APO(rule, model, criterion=F.cross_entropy, **options)
    pair = unrolled_twin.run(
        tuner, networks.batches(network, 4), named_factors(optimizer), make_update(decay), weight_decay=decay
    )
    pair.assert_equal()
    assert len(pair.found) == len(optimizer.factors())


def test_meta_gradient_during_a_warm_up_is_that_of_the_preconditioner_not_of_the_warm_up():
    model = networks.build("norm-and-dropout")
    warmup = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = apo.Kronecker(model, lr=0.05, warmup=warmup, warmup_steps=100)
    rule = apo.Preconditioned(optimizer, meta_optimizer=Scripted)
    tuner = apo.APO(rule, model, criterion=F.cross_entropy, interval=3)
    phi = named_factors(optimizer)
    unrolled_twin.run(tuner, networks.batches("norm-and-dropout", 4), phi, make_update(0.0)).assert_equal()
    assert optimizer.warming_up


@pytest.mark.parametrize("decay", [0.0, 0.1], ids=["plain", "decay"])
def test_meta_gradient_of_rate_and_momentum_is_that_of_the_unrolled_graph(decay):
    model = networks.build("norm-and-dropout")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8, weight_decay=decay)
    rule = apo.RateAndMomentum(optimizer, meta_optimizer=Scripted)
    tuner = apo.APO(rule, model, criterion=F.cross_entropy, interval=3)

    def build(model, optimizer, gradient):
        buffers = {name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()}

        def step(theta, phi):
            rate, momentum = phi["log_rate"].exp(), phi["logit"].sigmoid()
            return {
                name: updates.sgd(
                    theta[name],
                    gradient[name],
                    {"momentum_buffer": buffers[name]},
                    lr=rate,
                    momentum=momentum,
                    weight_decay=decay,
                )
                for name in theta
            }

        return step

    phi = dict(zip(("log_rate", "logit"), rule.phi(), strict=True))
    unrolled_twin.run(tuner, networks.batches("norm-and-dropout", 4), phi, build, weight_decay=decay).assert_equal()
