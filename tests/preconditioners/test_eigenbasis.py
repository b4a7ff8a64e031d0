"""The eigenbasis: its statistics, the change of basis, spikes, decay, momentum, and the defaults of its rule."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.preconditioners.zoo import ZOO, backward, build
from torch import nn
from torch.nn import functional as F

import apo
from apo.preconditioners import Eigenbasis, EigenbasisBlock, plan_layers


def gradients(count: int, shape=(3, 4)) -> list[torch.Tensor]:
    """Returns gradients whose second moments differ between directions that are no axes."""
    generator = torch.Generator().manual_seed(2)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    left, right = (torch.linalg.qr(draw(n, n))[0] * 3.0 ** -torch.arange(n) for n in shape)
    return [left @ draw(*shape) @ right.mT for _ in range(count)]


def observing(count: int, **options) -> EigenbasisBlock:
    block = EigenbasisBlock((3, 4), (-2, -1), dtype=torch.float64, **options)
    for gradient in gradients(count):
        block.observe(gradient)
    return block


def statistics(optimizer: Eigenbasis) -> dict[str, torch.Tensor]:
    return {
        f"{layer.name}/{key}": tensor.clone()
        for layer in optimizer.layers
        for key, tensor in layer.block.statistics.items()
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


# --- statistics ---


def test_averages_are_those_of_the_gradients_and_their_squares(monkeypatch):
    monkeypatch.setattr("apo.preconditioners.eigenbasis_block._LONGEST", 1e6)
    block, weights = observing(5, memory=0.9), [0.1 * 0.9**age for age in reversed(range(5))]
    for name, expected in {
        "average-2": sum(w * g @ g.mT for w, g in zip(weights, gradients(5), strict=True)),
        "average-1": sum(w * g.mT @ g for w, g in zip(weights, gradients(5), strict=True)),
        "V": sum(w * g.square() for w, g in zip(weights, gradients(5), strict=True)),  # the basis is still the axes
        "length": sum(w * g.square().mean() for w, g in zip(weights, gradients(5), strict=True)),
        "weight": torch.tensor(sum(weights), dtype=torch.float64),
    }.items():
        torch.testing.assert_close(block.statistics[name], expected, rtol=1e-12, atol=1e-14)


def test_an_exact_refresh_finds_the_eigenvectors_and_iterations_approach_them():
    block = observing(50)
    iterated = copy.deepcopy(block)
    block.refresh(exact=True)
    for side in (-2, -1):
        basis, average = block.statistics[f"basis{side}"], block.statistics[f"average{side}"]
        diagonal = basis.mT @ average @ basis
        assert (diagonal - diagonal.diag().diag()).abs().max() < 1e-12 * diagonal.abs().max()
    for _ in range(60):
        iterated.refresh()
    for side in (-2, -1):
        overlap = iterated.statistics[f"basis{side}"].mT @ block.statistics[f"basis{side}"]
        assert overlap.abs().max(0).values.min() > 1 - 1e-9


@pytest.mark.parametrize("exact", [True, False])
def test_the_spectrum_follows_a_change_of_basis(exact):
    """The second moments in the new basis are the diagonal of the rotated covariance, if the old one was diagonal."""
    block = observing(5)
    before, bases = block.statistics["V"].clone(), [block.statistics[f"basis{side}"].clone() for side in (-2, -1)]
    block.refresh(exact)
    assert not torch.equal(block.statistics["basis-2"], bases[0])
    old = torch.kron(*bases)
    new = torch.kron(block.statistics["basis-2"], block.statistics["basis-1"])
    covariance = old @ torch.diag(before.flatten()) @ old.mT  # of the flattened gradient, in the axes
    expected = (new.mT @ covariance @ new).diagonal().reshape(3, 4)
    torch.testing.assert_close(block.statistics["V"], expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(block.statistics["V"].mean(), before.mean(), rtol=1e-12, atol=0)


def test_the_rotated_spectrum_is_close_to_one_that_is_gathered_in_the_new_basis():
    block = observing(400)
    block.refresh(exact=True)
    rotated = block.statistics["V"].clone()
    fresh = EigenbasisBlock((3, 4), (-2, -1), dtype=torch.float64)
    for side in (-2, -1):
        fresh.statistics[f"basis{side}"].copy_(block.statistics[f"basis{side}"])
    for gradient in gradients(400):
        fresh.observe(gradient)
    for gradient in gradients(800)[400:]:
        block.observe(gradient)
    error = lambda v: (v / v.mean() - fresh.statistics["V"] / fresh.statistics["V"].mean()).abs().max()  # noqa: E731
    assert error(block.statistics["V"]) < 0.5 * error(rotated)  # four memories later the rest of the rotation is gone


def test_p_is_the_same_for_a_loss_that_is_multiplied_by_a_number():
    small, large = observing(5), EigenbasisBlock((3, 4), (-2, -1), dtype=torch.float64)
    for gradient in gradients(5):
        large.observe(1e3 * gradient)
    for block in (small, large):
        block.refresh(exact=True)
    torch.testing.assert_close(large.to_dense(), small.to_dense(), rtol=1e-9, atol=1e-12)


def test_a_spike_counts_for_twice_the_usual_length():
    block, gradient = observing(5), gradients(6)[-1]
    usual = (block.statistics["V"].sum() / block.statistics["weight"]).sqrt()
    spike = gradient * 100 * usual / gradient.norm()
    torch.testing.assert_close(block.apply(spike), block.apply(spike / 50), rtol=1e-12, atol=1e-12)
    for key, value in block.pull_back(spike, gradient).items():
        torch.testing.assert_close(value, block.pull_back(spike / 50, gradient)[key], rtol=1e-12, atol=1e-12)
    twin = copy.deepcopy(block)
    block.observe(spike)
    twin.observe(spike / 50)
    torch.testing.assert_close(block.statistics, twin.statistics, rtol=1e-12, atol=1e-12)


def test_a_gradient_that_is_zero_or_not_finite_does_not_raise():
    block = EigenbasisBlock((3, 4), (-2, -1))
    block.observe(torch.zeros(3, 4))
    block.refresh(exact=True)
    assert block.apply(torch.ones(3, 4)).isfinite().all()
    block.observe(torch.full((3, 4), torch.nan))
    block.refresh(exact=True)
    block.refresh()


def test_numbers_stay_in_their_range():
    block = EigenbasisBlock((3,))
    block.factors["log_rate"].fill_(200.0)
    block.factors["log_damping"].fill_(-200.0)
    block.constrain()
    assert block.apply(torch.ones(3)).isfinite().all()


# --- the plan ---


def test_wide_convolutions_are_factored_and_embeddings_are_diagonal():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.ConvTranspose2d(4, 5, 3), nn.Embedding(9, 3))
    plan = plan_layers(model, "eigenbasis", conv="auto", max_dim=30)
    found = {
        layer.name: (layer.block.shape, sorted(key for key in layer.block.statistics if "basis" in key))
        for layer in plan
    }
    three = ["basis-1", "basis-2", "basis-3"]
    assert found == {
        "0.weight": ((4, 19), ["basis-1", "basis-2"]),
        "1.weight": ((4, 9, 4), three),
        "1.bias": ((4,), []),
        "2.weight": ((5, 9, 4), three),
        "2.bias": ((5,), []),
        "3.weight": ((9, 3), []),
    }


def test_sides_that_are_too_long_have_no_basis():
    (layer,) = plan_layers(nn.Linear(8, 4), "eigenbasis", max_dim=8)
    assert [key for key in layer.block.statistics if "basis" in key] == ["basis-2"]


# --- the optimizer ---


@pytest.mark.parametrize("name", ZOO)
def test_layers_that_are_computed_together_are_those_that_are_computed_alone(name, monkeypatch):
    model, batch = build(name)
    twin = copy.deepcopy(model)
    together = Eigenbasis(model, lr=0.01)
    monkeypatch.setattr("apo.preconditioners.bundled._LARGEST", 1)
    alone = Eigenbasis(twin, lr=0.01)
    for _ in range(12):  # past the first change of basis
        for network, optimizer in ((model, together), (twin, alone)):
            backward(network, batch)
            optimizer.step()
    for key, value in statistics(alone).items():
        torch.testing.assert_close(statistics(together)[key], value, rtol=1e-6, atol=1e-9)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-10)


def test_measuring_leaves_the_statistics_and_a_step_takes_its_gradient_in_once():
    model, batch = build("mlp")
    optimizer = Eigenbasis(model)
    backward(model, batch)
    optimizer.step()
    before = statistics(optimizer)
    backward(model, batch)
    with optimizer.deferring():
        optimizer.step()
        for _ in range(3):
            optimizer.pull_back(optimizer.displacement())
    assert_same(statistics(optimizer), before)
    layer, expected = optimizer.layers[0], copy.deepcopy(optimizer.layers[0].block)
    expected.observe(layer.view.gather([p.grad for p in layer.params]))
    optimizer.take_step()
    assert_same(layer.block.statistics, expected.statistics)
    assert not torch.equal(layer.block.statistics["V"], before["0.weight/V"])


def test_statistics_are_gathered_during_a_warm_up_as_without_one():
    model, batch = build("mlp")
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    warmed, bare = Eigenbasis(model, warmup=sgd, warmup_steps=3), Eigenbasis(copy.deepcopy(model))
    backward(model, batch)
    warmed.step()
    for p, q in zip(bare.param_groups[0]["params"], model.parameters(), strict=True):
        p.grad = q.grad
    bare.step()
    assert_same(statistics(warmed), statistics(bare))


def test_bases_change_early_and_then_at_intervals():
    model = nn.Linear(3, 2)
    optimizer, changed = Eigenbasis(model, refresh_interval=7), []
    basis = optimizer.layers[0].block.statistics["basis-1"]
    for step in range(1, 36):
        before = basis.clone()
        model.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        if not torch.equal(basis, before):
            changed.append(step)
    assert changed == [7, 10, 14, 21, 28, 30, 35]


def test_decoupled_decay_is_in_proportion_to_the_mean_step_of_a_layer():
    model, batch = build("mlp")
    plain, decayed = copy.deepcopy(model), copy.deepcopy(model)
    optimizers = [Eigenbasis(plain), Eigenbasis(decayed, weight_decay=0.2, decoupled_weight_decay=True)]
    for network, optimizer in zip((plain, decayed), optimizers, strict=True):
        optimizer.layers[0].block.factors["log_rate"].fill_(1.0)
        optimizer.param_groups[0]["lr"] *= 0.5  # a schedule
        backward(network, batch)
        optimizer.step()
    for layer, p, q, start in zip(
        (optimizers[0].layers[0], *optimizers[0].layers[:1], *optimizers[0].layers[1:]),
        plain.parameters(), decayed.parameters(), model.parameters(), strict=True,
    ):  # fmt: skip
        mean = 0.1 * (torch.e if layer.name == "0.weight" else 1.0)
        torch.testing.assert_close(q, p - 0.9 * 0.5 * 0.2 * mean * start, rtol=1e-6, atol=1e-9)


def test_momentum_is_an_average_of_steps():
    theta = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = Eigenbasis(theta, lr=0.5, scale=1.0, momentum=0.8)
    expected = buffer = torch.zeros(2, dtype=torch.float64)
    for step in range(3):
        theta.grad = torch.tensor([1.0, 2.0 + step], dtype=torch.float64)
        (displacement,) = optimizer.displacement()
        buffer = 0.8 * buffer + 0.2 * displacement
        expected = expected + buffer
        optimizer.step()
    torch.testing.assert_close(theta.detach(), expected)


def test_sixteen_bit_gradients_have_statistics_in_float32():
    model = nn.Linear(3, 2).bfloat16()
    optimizer = Eigenbasis(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(5, 3, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
    gradient = torch.cat([model.weight.grad.float(), model.bias.grad.float()[:, None]], 1)
    found = optimizer.layers[0].block.statistics
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    torch.testing.assert_close(found["average-2"], 0.01 * gradient @ gradient.mT)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"refresh_interval": 0}, "refresh_interval must be a whole number of at least 1, got 0"),
        ({"memory": 1.0}, r"memory must be a number of at least 0 and below 1, got 1\.0"),
        ({"conv": "dense"}, "conv must be .*, got 'dense'"),
        ({"statistics": "hessian"}, "statistics must be 'gradients' or 'fisher', got 'hessian'"),
        ({"max_dim": 0}, "max_dim must be a positive integer, got 0"),
    ],
)
def test_refuses_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        Eigenbasis(nn.Linear(2, 2), **options)


# --- with its rule ---


def train(tuner, steps, seed=0):
    generator, losses = torch.Generator().manual_seed(seed), []
    teacher = torch.randn(6, 3, generator=torch.Generator().manual_seed(9))
    for _ in range(steps):
        x = torch.randn(16, 6, generator=generator)
        losses.append(float(tuner.step(x, (x @ teacher).argmax(1))))
    return losses


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def test_defaults_learn_from_any_rate_and_end_slowly():
    ends = []
    for lr in (1e-6, 1e3):
        model = network()
        optimizer = Eigenbasis(model, lr=lr)
        tuner = apo.APO(optimizer, model, F.cross_entropy, total_steps=300)
        losses = train(tuner, 300)
        assert [record.step for record in tuner.history][45:55] == [45, 46, 47, 48, 49, 50, 60, 70, 80, 90]
        assert sum(losses[-30:]) < 0.4 * sum(losses[:30])
        assert optimizer.param_groups[0]["lr"] == pytest.approx(lr * 0.01)
        ends.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-4)


def test_a_scheduler_takes_the_place_of_the_end():
    model = network()
    optimizer = Eigenbasis(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    tuner = apo.APO(optimizer, model, F.cross_entropy, total_steps=20)
    for _ in range(20):
        train(tuner, 1)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_run_resumes_bit_for_bit_across_changes_of_basis_and_the_end():
    model = network()
    tuner = apo.APO(Eigenbasis(model, refresh_interval=20), model, F.cross_entropy, total_steps=60)
    train(tuner, 35)
    twin = network()
    other = apo.APO(Eigenbasis(twin, refresh_interval=20), twin, F.cross_entropy, total_steps=60)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(tuner.state_dict()))
    for each in (tuner, other):
        train(each, 25, seed=5)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert_same(statistics(other.optimizer), statistics(tuner.optimizer))


def test_sampled_gradients_are_those_of_the_loss_at_targets_drawn_from_the_outputs(monkeypatch):
    model = network().double()
    tuner = apo.APO(Eigenbasis(model, statistics="fisher"), model, F.cross_entropy, fsd_weight=0.0)
    seen = []
    monkeypatch.setattr(tuner.optimizer, "observe_sampled", lambda found: seen.append(list(found.values())))
    x = torch.randn(8, 6, dtype=torch.float64)
    twin = copy.deepcopy(model)
    tuner.step(x, torch.zeros(8, dtype=torch.long))
    outputs = twin(x)
    apo.CategoricalKL().sampled_loss(outputs, torch.Generator().manual_seed(0)).backward()
    torch.testing.assert_close(seen, [[p.grad for p in twin.parameters()]], rtol=1e-12, atol=1e-14)


def test_fisher_statistics_learn_from_sampled_gradients_alone_and_resume():
    model = network()
    tuner = apo.APO(Eigenbasis(model, statistics="fisher"), model, F.cross_entropy, total_steps=200)
    block = tuner.optimizer.layers[0].block
    train(tuner, 52)
    kept = block.statistics["V"].clone()
    train(tuner, 8)
    assert torch.equal(block.statistics["V"], kept)  # no meta-step, nothing new
    twin = network()
    other = apo.APO(Eigenbasis(twin, statistics="fisher"), twin, F.cross_entropy, total_steps=200)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(tuner.state_dict()))
    losses = train(tuner, 140, seed=3)
    train(other, 140, seed=3)
    assert not torch.equal(block.statistics["V"], kept)
    assert_same(statistics(other.optimizer), statistics(tuner.optimizer))
    assert sum(losses[-20:]) / 20 < 0.5


def test_sampling_draws_nothing_from_the_training_stream():
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.2), nn.Linear(12, 3))
    tuner = apo.APO(Eigenbasis(model, statistics="fisher"), model, F.cross_entropy, interval=1)
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    torch.manual_seed(4)
    tuner.step(x, y)
    found = torch.get_rng_state()
    torch.manual_seed(4)
    model(x)
    assert torch.equal(torch.get_rng_state(), found)


def test_a_loss_without_a_distribution_cannot_be_sampled():
    model = network()
    tuner = apo.APO(Eigenbasis(model, statistics="fisher"), model, F.l1_loss)
    with pytest.raises(TypeError, match="targets cannot be drawn for HuberDistance"):
        tuner.step(torch.randn(4, 6), torch.randn(4, 3))


def test_groups_have_their_own_rates():
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters(), "weight_decay": 0.1}]
    tuner = apo.APO(Eigenbasis(model, params=groups), model, F.cross_entropy)
    losses = train(tuner, 150)
    assert sum(losses[-30:]) < 0.5 * sum(losses[:30])
