"""Limits in which the outcome is known: a phi that never moves, and terms that count for everything or nothing."""

import functools
import itertools

import pytest
import torch
from tests.core import networks
from torch.nn import functional as F

import apo

#: Every optimizer of torch whose step is linear in its rate: class, options.
LINEAR = {
    "sgd": ("SGD", {}),
    "sgd-momentum": ("SGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "sgd-nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {"weight_decay": 0.1}),
    "adam-amsgrad": ("Adam", {"amsgrad": True}),
    "adamw": ("AdamW", {"weight_decay": 0.1}),
    "nadam": ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": ("RAdam", {"weight_decay": 0.1}),
    "rmsprop": ("RMSprop", {"momentum": 0.9, "centered": True}),
    "adagrad": ("Adagrad", {"lr_decay": 0.01, "weight_decay": 0.1}),
    "adadelta": ("Adadelta", {}),
    "adamax": ("Adamax", {}),
    "muon": ("Muon", {"weight_decay": 0.1}),
}
frozen = functools.partial(torch.optim.SGD, lr=0.0)


def start(case, dtype):
    name, options = LINEAR[case]
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    network = "matrices-only" if name == "Muon" else "norm-and-dropout"
    model = networks.build(network, dtype)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
    return model, optimizer, networks.batches(network, 7, dtype=dtype)


def train_bare(model, optimizer, batches):
    torch.manual_seed(3)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def train_with_apo(model, optimizer, batches, interval, look_ahead="tail"):
    rule = apo.LearningRate(optimizer, warm_start=False, meta_optimizer=frozen, look_ahead=look_ahead)
    tuner = apo.APO(rule, model, criterion=F.cross_entropy, interval=interval)
    torch.manual_seed(3)
    for x, y in batches:
        tuner.step(x, y)
    return tuner


def states(optimizer):
    """Returns the optimizer's state as named tensors."""
    saved = optimizer.state_dict()["state"]
    return {f"{i}/{key}": torch.as_tensor(value) for i, entry in saved.items() for key, value in entry.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", LINEAR)
def test_with_phi_frozen_a_run_is_that_of_the_base_optimizer_to_rounding(case, dtype):
    model, optimizer, batches = start(case, dtype)
    twin, bare, _ = start(case, dtype)
    train_bare(twin, bare, batches)
    tuner = train_with_apo(model, optimizer, batches, interval=2)
    assert len(tuner.history) == 4
    # Muon rounds its direction to bfloat16, which magnifies a last digit of the gradient.
    rtol = 1e-2 if case == "muon" else 1e-12 if dtype == torch.float64 else 1e-5
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        error = torch.linalg.vector_norm(p.detach() - q.detach())
        assert error <= rtol * torch.linalg.vector_norm(q.detach())


@pytest.mark.parametrize("look_ahead", ["tail", "step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", LINEAR)
def test_one_meta_step_leaves_the_state_of_the_base_optimizer_bit_identical(case, dtype, look_ahead):
    model, optimizer, batches = start(case, dtype)
    twin, bare, _ = start(case, dtype)
    # interval 3: steps 0 and 3 are meta-steps. Before each, the twin is put where the model is.
    rule = apo.LearningRate(optimizer, warm_start=False, meta_optimizer=frozen, look_ahead=look_ahead)
    tuner = apo.APO(rule, model, criterion=F.cross_entropy, interval=3)
    bare.param_groups[0]["lr"] = rule.rates()[0]  # exp(log(0.01)), which need not be 0.01 to the last digit
    for index, batch in enumerate(batches[:4]):
        twin.load_state_dict(model.state_dict())
        state = torch.get_rng_state()
        tuner.step(*batch)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        bare.zero_grad()
        F.cross_entropy(twin(batch[0]), batch[1]).backward()
        bare.step()
        assert torch.equal(torch.get_rng_state(), after)
        found, expected = states(optimizer), states(bare)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected), index
        rtol = 1e-12 if dtype == torch.float64 else 1e-6
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            if index in (1, 2):
                assert torch.equal(p, q)
            else:
                torch.testing.assert_close(p, q, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("case", LINEAR)
def test_off_meta_steps_nothing_differs_from_the_base_optimizer(case):
    model, optimizer, batches = start(case, torch.float32)
    twin, bare, _ = start(case, torch.float32)
    rule = apo.LearningRate(optimizer, warm_start=False)
    tuner = apo.APO(rule, model, criterion=F.cross_entropy, interval=100)
    tuner.steps = 1  # so that none of the steps is a meta-step
    torch.manual_seed(3)
    for x, y in batches:
        tuner.step(x, y)
    train_bare(twin, bare, batches)
    assert len(tuner.history) == 0
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, states(bare)[key]) for key, value in states(optimizer).items())


@pytest.mark.parametrize("structure", [apo.Full, apo.Diagonal, apo.Kronecker])
def test_with_its_matrices_frozen_a_preconditioner_runs_bit_for_bit_as_without_apo(structure):
    models = [networks.build("norm-and-dropout", torch.float32) for _ in range(2)]
    optimizer, bare = (structure(model, lr=0.05, momentum=0.5, weight_decay=0.1) for model in models)
    batches = networks.batches("norm-and-dropout", 5, dtype=torch.float32)
    tuner = apo.APO(
        apo.Preconditioned(optimizer, meta_optimizer=frozen), models[0], criterion=F.cross_entropy, interval=1
    )
    torch.manual_seed(3)
    for x, y in batches:
        tuner.step(x, y)
    train_bare(models[1], bare, batches)
    assert all(torch.equal(value, models[1].state_dict()[name]) for name, value in models[0].state_dict().items())


def test_with_phi_frozen_rate_and_momentum_run_as_sgd_to_rounding():
    models = [networks.build("norm-and-dropout") for _ in range(2)]
    optimizer, bare = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.8, weight_decay=0.1) for m in models)
    batches = networks.batches("norm-and-dropout", 5)
    tuner = apo.APO(
        apo.RateAndMomentum(optimizer, meta_optimizer=frozen), models[0], criterion=F.cross_entropy, interval=1
    )
    torch.manual_seed(3)
    for x, y in batches:
        tuner.step(x, y)
    train_bare(models[1], bare, batches)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)
    for key, value in states(bare).items():
        torch.testing.assert_close(states(optimizer)[key], value, rtol=1e-12, atol=1e-13)


def learned_rate(steps=40, **options):
    model, batches = networks.build("norm-and-dropout"), networks.batches("norm-and-dropout", 4)
    rule = apo.LearningRate(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), warm_start=False)
    tuner = apo.APO(rule, model, criterion=F.cross_entropy, interval=1, **options)
    for index in range(steps):
        tuner.step(*batches[index % 4])
    return rule.rates()[0], tuner


@pytest.mark.parametrize("term", ["fsd_weight", "wsd_weight"])
def test_a_huge_weight_of_either_discrepancy_drives_the_rate_down_until_the_weights_hardly_move(term):
    _, tuner = learned_rate(**{term: 1e6})
    rates = tuner.history.column("lr/0")
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[:10]))
    assert max(rates[10:]) < 1e-5  # then it stays at its turning point


def test_a_larger_weight_gives_a_smaller_rate_and_weight_zero_the_largest():
    rates = [learned_rate(steps=30, fsd_weight=weight)[0] for weight in (0.0, 1.0, 10.0, 100.0)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 2 * rates[-1]


def test_without_discrepancies_the_objective_is_the_look_ahead_loss_alone():
    _, tuner = learned_rate(steps=3, fsd_weight=0.0, wsd_weight=0.0)
    assert all(record.objective == record.look_ahead_loss for record in tuner.history)
    assert all(record.fsd == 0 for record in tuner.history)


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_a_look_ahead_that_goes_nowhere_has_the_objective_of_theta_itself(share):
    model = networks.build("norm-and-dropout")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-14, weight_decay=0.3)
    rule = apo.LearningRate(optimizer, warm_start=False, meta_optimizer=frozen, bounds=(1e-15, 1.0))
    tuner = apo.APO(rule, model, criterion=F.cross_entropy, interval=1, other_batch_share=share)
    for x, y in networks.batches("norm-and-dropout", 3):
        tuner.step(x, y)
    for record in tuner.history:
        assert record.objective == pytest.approx(record.loss, rel=1e-9)


def test_weight_decay_does_not_keep_a_warm_up_from_handing_over():
    model = torch.nn.Linear(4, 3, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(10.0)  # its decay is a large part of the loss
    warmup = torch.optim.SGD(model.parameters(), lr=1e-6)
    optimizer = apo.Kronecker(model, lr=1e-4, weight_decay=0.1, warmup=warmup, warmup_steps=2)
    tuner = apo.APO(apo.Preconditioned(optimizer, patience=2), model, criterion=F.cross_entropy, interval=1)
    for _ in range(6):
        tuner.step(torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,)))
    assert not optimizer.warming_up
