"""The engine's meta-gradient of learning rates is the one of the unrolled graph, to 1e-10 in float64."""

import functools

import pytest
import torch
from tests.core import networks, unrolled_twin
from tests.core.scripted import Scripted
from torch.nn import functional as F

import apo
from apo.reference import updates

# Networks and rates are chosen for their arithmetic: some of the losses explode.
pytestmark = pytest.mark.filterwarnings("ignore:.*several times its first value:apo.ApoWarning")

OPTIMIZERS = {
    "sgd": ("SGD", updates.sgd, {}),
    "sgd-momentum": ("SGD", updates.sgd, {"momentum": 0.9, "dampening": 0.2}),
    "sgd-nesterov": ("SGD", updates.sgd, {"momentum": 0.9, "nesterov": True}),
    "rmsprop": ("RMSprop", updates.rmsprop, {}),
    "rmsprop-momentum": ("RMSprop", updates.rmsprop, {"momentum": 0.9, "centered": True}),
    "adam": ("Adam", updates.adam, {}),
    "adam-amsgrad": ("Adam", updates.adam, {"amsgrad": True}),
    "adamw": ("AdamW", updates.adamw, {}),
    "nadam": ("NAdam", updates.nadam, {}),
    "adamax": ("Adamax", updates.adamax, {}),
}
DECOUPLED = {"AdamW", "Muon"}
RATE = 0.02


def rule_for(optimizer, **options):
    settings = {"look_ahead": "step", "over_relaxation": 1.0, "warm_start": False, "meta_optimizer": Scripted}
    return apo.LearningRate(optimizer, **(settings | options))


def make_update(update, options, owner=lambda name: "lr"):
    """Unrolls one step of `update`, every parameter at the rate exp(phi[owner(name)])."""

    def build(model, optimizer, gradient):
        states = {name: dict(optimizer.state.get(p, {})) for name, p in model.named_parameters()}

        def step(theta, phi):
            return {
                name: update(theta[name], gradient[name], states[name], lr=phi[owner(name)].exp(), **options)
                for name in theta
            }

        return step

    return build


def log(rate):
    return torch.tensor(rate, dtype=torch.float64).log()


def compare(network, name, update, options, *, loss=F.cross_entropy, steps=5, decay=0.0, **tuner_options):
    model = networks.build(network)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=RATE, weight_decay=decay, **options)
    settings = {"fsd_weight": 0.3, "wsd_weight": 0.2, "interval": steps - 1}
    tuner = apo.APO(rule_for(optimizer), model, criterion=loss, **(settings | tuner_options))
    return unrolled_twin.run(
        tuner,
        networks.batches(network, steps),
        {"lr": log(RATE)},
        make_update(update, options | {"weight_decay": decay}),
        weight_decay=0.0 if name in DECOUPLED else decay,
    )


@pytest.mark.parametrize("decay", [0.0, 0.1], ids=["plain", "decay"])
@pytest.mark.parametrize("network", ["norm-and-dropout", "convolutions", "embeddings"])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_meta_gradient_and_terms_are_those_of_the_unrolled_graph(case, network, decay):
    compare(network, *OPTIMIZERS[case], decay=decay).assert_equal()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("decay", [0.0, 0.1], ids=["plain", "decay"])
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "heavy-ball"])
def test_meta_gradient_of_muon_is_that_of_the_unrolled_graph(nesterov, decay):
    compare("matrices-only", "Muon", updates.muon, {"nesterov": nesterov}, decay=decay).assert_equal()


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_first_step_without_any_state_agrees_too(case):
    model = networks.build("norm-and-dropout")
    name, update, options = OPTIMIZERS[case]
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=RATE, weight_decay=0.1, **options)
    tuner = apo.APO(rule_for(optimizer), model, criterion=F.cross_entropy, interval=1)
    unrolled_twin.run(
        tuner,
        networks.batches("norm-and-dropout", 1),
        {"lr": log(RATE)},
        make_update(update, options | {"weight_decay": 0.1}),
        weight_decay=0.0 if name in DECOUPLED else 0.1,
    ).assert_equal()


LOSSES = {
    "categorical": (F.cross_entropy, apo.CategoricalKL()),
    "bernoulli": (networks.one_hot_bce, apo.BernoulliKL()),
    "gaussian": (networks.one_hot_mse, apo.GaussianKL(variance=0.5)),
    "squared": (networks.one_hot_mse, apo.SquaredError("mean")),
    "bregman": (F.cross_entropy, apo.Bregman(F.cross_entropy)),
    "auto": (F.cross_entropy, "auto"),
}


@pytest.mark.parametrize("divergence", LOSSES)
def test_every_divergence_agrees(divergence):
    loss, discrepancy = LOSSES[divergence]
    pair = compare("norm-and-dropout", *OPTIMIZERS["adam"], loss=loss, discrepancy=discrepancy, decay=0.1)
    pair.assert_equal()
    assert pair.record.fsd > 0


@pytest.mark.parametrize("weights", [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (30.0, 30.0)], ids=repr)
def test_every_mixture_of_the_terms_agrees(weights):
    fsd, wsd = weights
    pair = compare("convolutions", *OPTIMIZERS["sgd-momentum"], fsd_weight=fsd, wsd_weight=wsd)
    if fsd:
        pair.assert_equal()
    else:  # nobody evaluates a term that counts for nothing
        torch.testing.assert_close(pair.found[0], pair.expected["lr"], rtol=1e-10, atol=0)
        assert pair.record.fsd == 0


def test_fsd_on_the_training_batch_itself_agrees():
    model, batches = networks.build("norm-and-dropout"), networks.batches("norm-and-dropout", 3)
    tuner = apo.APO(
        rule_for(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)),
        model,
        criterion=F.cross_entropy,
        fsd_batch="same",
        interval=2,
    )
    for inputs, target in batches[:-1]:
        tuner.step(inputs, target)
    # The outputs of training serve as those at theta, so the dropout masks are those of training.
    masks = torch.get_rng_state()
    update = make_update(updates.sgd, {"momentum": 0.9})
    pair = unrolled_twin.run(tuner, batches[-1:], {"lr": log(RATE)}, update, changes={"fsd_randomness": masks})
    pair.assert_equal()
    assert pair.record.fsd > 0


def test_fsd_on_a_stream_of_batches_agrees():
    model, batches = networks.build("embeddings"), networks.batches("embeddings", 5)
    tuner = apo.APO(
        rule_for(torch.optim.Adam(model.parameters(), lr=RATE)),
        model,
        criterion=F.cross_entropy,
        fsd_batch=batches[3:],
        interval=2,
    )
    # Meta-steps 0 and 2 take the first and the second batch of the stream.
    update = make_update(updates.adam, {})
    unrolled_twin.run(tuner, batches[:3], {"lr": log(RATE)}, update, changes={"fsd_batch": batches[4]}).assert_equal()


def test_one_rate_per_group_gives_one_derivative_per_group():
    model = networks.build("convolutions")
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.03, "weight_decay": 0.2},
        {"params": [p for layer in model[1:6] for p in layer.parameters()], "lr": 0.01},
        {"params": list(model[6].parameters())},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    owner = {
        name: 0 if name.startswith("0.") else 2 if name.startswith("6.") else 1 for name, _ in model.named_parameters()
    }
    tuner = apo.APO(rule_for(optimizer, per_group=True), model, criterion=F.cross_entropy, wsd_weight=0.1, interval=3)

    def build(model, optimizer, gradient):
        state = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
        decay = (0.2, 0.0, 0.0)

        def step(theta, phi):
            return {
                name: updates.sgd(
                    theta[name],
                    gradient[name],
                    state[name],
                    lr=phi[str(owner[name])].exp(),
                    momentum=0.9,
                    weight_decay=decay[owner[name]],
                )
                for name in theta
            }

        return step

    unrolled_twin.run(
        tuner,
        networks.batches("convolutions", 4),
        {"0": log(0.03), "1": log(0.01), "2": log(0.05)},
        build,
        weight_decay={name: 0.2 for name, group in owner.items() if group == 0},
    ).assert_equal()


def test_groups_in_a_fixed_ratio_share_one_derivative():
    model = networks.build("norm-and-dropout")
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam([{"params": parameters[:2], "lr": 0.04}, {"params": parameters[2:]}], lr=0.01)
    first = {"0.weight", "1.weight"}
    tuner = apo.APO(rule_for(optimizer), model, criterion=F.cross_entropy, interval=3)

    def build(model, optimizer, gradient):
        state = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}

        def step(theta, phi):
            rate = {name: phi["lr"].exp() * (1.0 if name in first else 0.25) for name in theta}
            return {name: updates.adam(theta[name], gradient[name], state[name], lr=rate[name]) for name in theta}

        return step

    pair = unrolled_twin.run(tuner, networks.batches("norm-and-dropout", 4), {"lr": log(0.04)}, build)
    pair.assert_equal()


def test_accumulated_micro_batches_are_one_loss():
    model = networks.build("embeddings").eval()  # without dropout: the reference draws one stream for the whole batch
    (x, y), (x2, y2), (old_x, old_y) = networks.batches("embeddings", 3)
    tuner = apo.APO(
        rule_for(torch.optim.SGD(model.parameters(), lr=RATE)),
        model,
        criterion=F.cross_entropy,
        interval=1,
        wsd_weight=0.1,
    )
    tuner.step(old_x, old_y)
    theta = {name: p.detach().clone() for name, p in model.named_parameters()}
    tuner.optimizer.zero_grad()
    tuner.backward(x, y, weight=0.5)
    tuner.backward(x2, y2, weight=0.5)
    gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
    tuner.step()
    _, expected = apo.reference.unrolled_meta_gradient(
        model,
        lambda theta, phi: {name: theta[name] - phi["lr"].exp() * gradient[name] for name in theta},
        {"lr": log(RATE)},
        theta=theta,
        loss=F.cross_entropy,
        batch=(torch.cat([x, x2]), torch.cat([y, y2])),
        fsd_batch=(old_x, old_y),
        discrepancy=apo.CategoricalKL(),
        fsd_weight=0.3,
        wsd_weight=0.1,
    )
    torch.testing.assert_close(tuner.rule.meta_optimizer.seen[-1][0], expected["lr"], rtol=1e-10, atol=0)


def test_the_other_front_door_finds_the_same_meta_gradient():
    batches = networks.batches("convolutions", 4)
    found = []
    for door in ("explicit", "attach"):
        model, criterion = networks.build("convolutions"), torch.nn.CrossEntropyLoss()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
        build = functools.partial(apo.APO, rule_for(optimizer), model, criterion)
        if door == "attach":
            build = functools.partial(apo.attach, rule_for(optimizer), model, criterion)
        tuner = build(interval=1, wsd_weight=0.1)
        torch.manual_seed(5)
        for x, y in batches:
            if door == "explicit":
                tuner.step(x, y)
            else:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
        found.append(torch.stack([gradient[0] for gradient in tuner.rule.meta_optimizer.seen]))
    assert len(found[0]) == 4
    assert torch.equal(*found)


def test_both_passes_of_the_fsd_term_share_their_dropout_masks_whatever_was_drawn_before_the_step():
    model = networks.build("norm-and-dropout")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-13)  # theta' is theta, all but
    tuner = apo.APO(rule_for(optimizer, bounds=(1e-20, 1.0)), model, criterion=F.cross_entropy, interval=1)
    for x, y in networks.batches("norm-and-dropout", 3):
        optimizer.zero_grad()
        tuner.backward(x, y)
        torch.rand(7)
        tuner.step()
    assert all(abs(record.fsd) < 1e-12 for record in tuner.history)
    assert all(record.look_ahead_loss == pytest.approx(record.loss, rel=1e-12) for record in tuner.history)


def meta_step_with_share(share, batches):
    model = networks.build("norm-and-dropout")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=0.1)
    tuner = apo.APO(
        rule_for(optimizer), model, criterion=F.cross_entropy, fsd_weight=0.3, wsd_weight=0.2, interval=4,
        other_batch_share=share,
    )  # fmt: skip
    update = make_update(updates.sgd, {"momentum": 0.9, "weight_decay": 0.1})
    changes = {}
    if share == 1:  # the other batch, with the random numbers of the function-space term

        def randomness_of_the_meta_step(*_):
            changes.update(batch=batches[-2], loss_randomness=torch.get_rng_state())

        tuner.optimizer.register_step_pre_hook(randomness_of_the_meta_step)
    return unrolled_twin.run(tuner, batches, {"lr": log(RATE)}, update, weight_decay=0.1, changes=changes)


def test_a_share_of_the_loss_on_the_other_batch_mixes_the_two_meta_gradients():
    batches = networks.batches("norm-and-dropout", 5)
    same, mixed, other = (meta_step_with_share(share, batches) for share in (0.0, 0.3, 1.0))
    same.assert_equal()
    other.assert_equal()
    assert (same.found[0] - other.found[0]).abs() > 1e-3 * same.found[0].abs()
    torch.testing.assert_close(mixed.found[0], 0.7 * same.found[0] + 0.3 * other.found[0], rtol=1e-10, atol=0)
    expected = 0.7 * same.record.objective + 0.3 * other.record.objective
    assert mixed.record.objective == pytest.approx(expected, rel=1e-10)
