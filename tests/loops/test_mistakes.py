"""Slips of the pen, and things a loop keeps beside its weights: each gets its sentence, or does no harm."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
from tests.loops.loop import Run, assert_at_work, assert_learns, digit_batches, mlp, wrong
from torch import nn

import apo

RATES = [0.1, 0.3]


def sgdm(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def test_a_criterion_class_in_place_of_an_instance_is_refused():
    model = mlp()
    with pytest.raises(TypeError, match=r"criterion.*CrossEntropyLoss\(\)"):
        apo.attach(sgdm(model, 0.1), model, nn.CrossEntropyLoss)


def test_a_loss_class_in_place_of_an_instance_is_refused_by_the_other_door():
    model = mlp()
    with pytest.raises(TypeError, match=r"criterion must be a loss.*CrossEntropyLoss\(\)"):
        apo.APO(sgdm(model, 0.1), model, criterion=nn.CrossEntropyLoss)


@pytest.mark.parametrize("door", [apo.attach, apo.APO])
@pytest.mark.parametrize("order", ["mco", "ocm", "com", "cmo"])
def test_swapped_arguments_are_refused_with_the_right_order(door, order):
    model = mlp()
    arguments = {"o": sgdm(model, 0.1), "m": model, "c": nn.CrossEntropyLoss()}
    with pytest.raises(TypeError, match=r"order apo\.(attach|APO)\(optimizer, model, criterion\), got .*: swap"):
        door(*(arguments[letter] for letter in order))


def test_attach_refuses_the_network_before_the_optimizer():
    model = mlp()
    with pytest.raises(
        TypeError, match=r"attach\(optimizer, model, criterion\), got Sequential, SGD, CrossEntropyLoss"
    ):
        apo.attach(model, sgdm(model, 0.1), nn.CrossEntropyLoss())


@pytest.mark.parametrize("box", [nn.ModuleList, lambda parts: nn.ModuleDict(dict(zip("ab", parts, strict=True)))])
def test_a_list_of_networks_that_nobody_calls_is_refused_with_what_to_do(box):
    model = box([mlp(), mlp()])
    with pytest.raises(
        TypeError, match=r"model must be a module that the loop calls, got a Module(List|Dict).*forward"
    ):
        apo.attach(sgdm(model, 0.1), model, nn.CrossEntropyLoss())


def test_a_group_with_a_rate_of_zero_is_refused_with_what_to_do():
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.0}]
    with pytest.raises(ValueError, match=r"param group 1.*0.*(requires_grad|leave|freeze)"):
        apo.attach(torch.optim.SGD(groups, lr=0.1), model, nn.CrossEntropyLoss())


def test_a_loss_of_torch_that_is_made_larger_is_warned_of():
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = sgdm(model, 1e-3)
    apo.attach(optimizer, model, criterion)
    with pytest.warns(apo.ApoWarning, match=r"criterion must be minimised, got a negative weight") as caught:
        for x, y in digit_batches(12):
            optimizer.zero_grad()
            (-criterion(model(x), y)).backward()
            optimizer.step()
    assert sum("negative weight" in str(one.message) for one in caught) == 1


def test_an_optimizer_that_maximises_is_refused_with_what_to_do():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    with pytest.raises(ValueError, match=r"maximize=True.*minimise the negative"):
        apo.attach(optimizer, model, nn.CrossEntropyLoss())


def test_a_score_whose_negative_is_minimised_ends_near_the_best_rate():
    def loop(lr, attach):
        model = mlp()
        score = apo.criterion(lambda output, y: -nn.functional.cross_entropy(output, y))
        optimizer = sgdm(model, lr)
        tuner, start = attach(optimizer, model, score, discrepancy=apo.CategoricalKL()), wrong(model)
        for x, y in digit_batches(200):
            optimizer.zero_grad()
            (-score(model(x), y)).backward()
            optimizer.step()
        return Run(start, wrong(model), tuner)

    assert_learns(loop, RATES, short=0.06)


def test_a_loop_that_never_calls_the_criterion_it_named_is_refused():
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = sgdm(model, 0.1)
    apo.attach(optimizer, model, criterion)
    x, y = next(digit_batches(1))
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(apo.ReplayError, match=r"criterion\(\.\.\.\)"):
        optimizer.step()


def test_a_loop_that_calls_forward_itself_is_refused():
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = sgdm(model, 0.1)
    apo.attach(optimizer, model, criterion)
    x, y = next(digit_batches(1))
    criterion(model.forward(x), y).backward()
    with pytest.raises(apo.ReplayError, match=r"model\(\.\.\.\).*not model\.forward"):
        optimizer.step()


def test_a_function_that_ran_compiled_before_attaching_is_refused_with_what_to_do():
    model, criterion = mlp(), nn.CrossEntropyLoss()
    loss_of = torch.compile(lambda x, y: criterion(model(x), y), backend="eager")
    x, y = next(digit_batches(1))
    loss_of(x, y)
    optimizer = sgdm(model, 0.1)
    apo.attach(optimizer, model, criterion)
    loss_of(x, y).backward()
    with pytest.raises(apo.ReplayError, match=r"attach before torch\.compile first runs a function"):
        optimizer.step()


def test_validation_without_no_grad_does_not_keep_its_outputs():
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = sgdm(model, 0.01)
    tuner = apo.attach(optimizer, model, criterion, interval=1)
    for x, y in digit_batches(5):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        outputs = []
        for x, y in digit_batches(50):
            output = model(x)
            criterion(output, y).item()
            outputs.append(weakref.ref(output))
        alive = sum(output() is not None for output in outputs)
        assert alive <= 10, f"{alive} of 50 outputs of a validation are kept"
    assert_at_work(tuner)


class Remembering(nn.Module):
    """A network with a state in a plain attribute, which its every pass moves."""

    def __init__(self):
        super().__init__()
        self.body, self.state, self.passes = mlp(128, 10), torch.zeros(64), 0

    def forward(self, x):
        self.passes += 1
        self.state = 0.9 * self.state.detach() + 0.1 * x.mean(0)
        return self.body(torch.cat([x, self.state.expand_as(x)], dim=1))


class RememberingInPlace(Remembering):
    """The same, written into a tensor and a list of it."""

    def __init__(self):
        super().__init__()
        self.states = [self.state]

    def forward(self, x):
        self.passes += 1
        self.states.append(self.states.pop().mul_(0.9).add_(0.1 * x.mean(0)))
        return self.body(torch.cat([x, self.state.clone().expand_as(x)], dim=1))


@pytest.mark.parametrize("network", [Remembering, RememberingInPlace])
def test_a_state_that_the_network_keeps_in_an_attribute_is_moved_by_training_alone(network):
    expected = torch.zeros(64)
    model, criterion = network(), nn.CrossEntropyLoss()
    optimizer = sgdm(model, 0.01)
    tuner = apo.attach(optimizer, model, criterion)
    for x, y in digit_batches(25):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        expected = 0.9 * expected + 0.1 * x.mean(0)
        torch.testing.assert_close(model.state, expected)
    assert model.passes == 25
    assert_at_work(tuner)


def test_a_pass_that_is_run_again_starts_from_the_state_of_the_training_pass():
    outputs = []

    class Listening(Remembering):
        def forward(self, x):
            output = super().forward(x)
            outputs.append(output.detach())
            return output

    model, criterion = Listening(), nn.CrossEntropyLoss()
    optimizer = sgdm(model, 1e-9)
    apo.attach(apo.LearningRate(optimizer, warm_start=False), model, criterion, interval=5)
    for x, y in digit_batches(6):
        optimizer.zero_grad()
        outputs.clear()
        criterion(model(x), y).backward()
        optimizer.step()
    assert len(outputs) == 4  # training, B' at theta, B and B' at theta'
    torch.testing.assert_close(outputs[2], outputs[0])
    torch.testing.assert_close(outputs[3], outputs[1])


class Spectrum(nn.Module):
    """Complex weights, kept as complex numbers or as pairs of real ones."""

    def __init__(self, real):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(64, 32), (32, 10)]
        weights = [torch.randn(n, m, dtype=torch.complex64, generator=generator) / n**0.5 for n, m in shapes]
        self.real = real
        self.weights = nn.ParameterList([torch.view_as_real(w).clone() if real else w for w in weights])

    def forward(self, x):
        first, last = [torch.view_as_complex(w) if self.real else w for w in self.weights]
        hidden = x.to(torch.complex64) @ first
        return ((hidden * torch.tanh(hidden.abs())) @ last).real


COMPLEX = {
    "SGDm": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-4),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, lr=1e-4),
}


@pytest.mark.parametrize("kind", COMPLEX)
def test_complex_weights_learn_what_their_real_view_learns(kind):
    ends = []
    for real in (True, False):
        model, criterion = Spectrum(real), nn.CrossEntropyLoss()
        optimizer = COMPLEX[kind](model.parameters())
        tuner = apo.attach(optimizer, model, criterion)
        for x, y in digit_batches(60):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        assert_at_work(tuner, 1e-4)
        ends.append((float(optimizer.param_groups[0]["lr"]), loss.item()))
    assert ends[0] == pytest.approx(ends[1], rel=0.02), f"rate and loss {ends[0]} as real, {ends[1]} as complex"


def test_a_loss_that_is_not_finite_ends_the_run_with_the_way_to_skip_it():
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = sgdm(model, 0.01)
    apo.attach(optimizer, model, criterion)
    with pytest.raises(apo.NonFiniteError, match="skip"):
        for step, (x, y) in enumerate(digit_batches(30)):
            optimizer.zero_grad()
            criterion(model(x * float("inf") if step == 10 else x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("door", ["attach", "closure", "APO"])
@pytest.mark.parametrize("bad_steps", [(10,), (3, 4, 20)], ids=["a meta-step", "ordinary steps and a meta-step"])
def test_steps_that_are_not_finite_are_skipped_if_asked_for(door, bad_steps):
    ends = []
    for bad in (bad_steps, ()):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = sgdm(model, 0.01)
        build = apo.APO if door == "APO" else apo.attach
        tuner = build(optimizer, model, criterion, on_nonfinite="skip")
        steps = [(x, y) for x, y in digit_batches(30)]
        for index in bad:
            steps.insert(index, (steps[index][0] * float("nan"), steps[index][1]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", apo.ApoWarning)
            for x, y in steps:
                take_step(door, tuner, optimizer, model, criterion, x, y)
        assert [str(warning.message).count("left out") for warning in caught] == ([1] if bad else [])
        assert tuner.skipped_steps == len(bad)
        assert tuner.steps == 30
        ends.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


def take_step(door, tuner, optimizer, model, criterion, x, y):
    def closure():
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        return loss

    if door == "APO":
        tuner.step(x, y)
    elif door == "closure":
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def test_an_unknown_way_with_steps_that_are_not_finite_is_refused():
    model = mlp()
    with pytest.raises(ValueError, match="on_nonfinite must be 'raise' or 'skip', got 'ignore'"):
        apo.attach(sgdm(model, 0.1), model, nn.CrossEntropyLoss(), on_nonfinite="ignore")


def test_a_criterion_that_calls_the_network_is_told_to_take_its_output():
    model = mlp()
    criterion = apo.criterion(lambda network, x, y: nn.functional.cross_entropy(network(x), y))
    optimizer = sgdm(model, 0.1)
    apo.attach(optimizer, model, criterion, discrepancy=apo.CategoricalKL())
    criterion(model, *next(digit_batches(1))).backward()
    with pytest.raises(apo.ReplayError, match=r"calls the network itself: call the network outside"):
        optimizer.step()


def test_another_criterion_than_the_watched_one_is_named():
    model = mlp()
    optimizer = sgdm(model, 0.1)
    apo.attach(optimizer, model, nn.CrossEntropyLoss())
    x, y = next(digit_batches(1))
    nn.CrossEntropyLoss(weight=torch.ones(10))(model(x), y).backward()
    with pytest.raises(apo.ReplayError, match="another criterion"):
        optimizer.step()


class Lookahead(torch.optim.Optimizer):
    """Follows another optimizer slowly."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state
        self.defaults, self.slow = {}, [p.detach().clone() for p in optimizer.param_groups[0]["params"]]

    def step(self):
        self.optimizer.step()
        with torch.no_grad():
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                p.copy_(slow.lerp_(p, 0.5))


def test_an_optimizer_that_wraps_another_one_is_refused_with_the_one_to_pass():
    model = mlp()
    with pytest.raises(
        apo.NotLinearError, match=r"Lookahead wraps an optimizer: give apo that one, optimizer\.optimizer"
    ):
        apo.attach(Lookahead(sgdm(model, 0.1)), model, nn.CrossEntropyLoss())


def test_the_optimizer_inside_a_wrapper_ends_near_the_best_rate():
    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        inner = sgdm(model, lr)
        optimizer = Lookahead(inner)
        tuner, start = attach(inner, model, criterion), wrong(model)
        for x, y in digit_batches(200):
            inner.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        return Run(start, wrong(model), tuner)

    assert_learns(loop, [*RATES, 1.0], short=0.05)


class TwoHeads(nn.Module):
    """Which head is used is an attribute that the loop sets."""

    def __init__(self):
        super().__init__()
        self.body, self.task = mlp(64, 30), 0
        self.heads = nn.ModuleList([nn.Linear(30, 10), nn.Linear(30, 2)])

    def forward(self, x):
        return self.heads[self.task](self.body(x).relu())


def tasks_in_turn(**options):
    model, criterion = TwoHeads(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tuner = apo.attach(optimizer, model, criterion, **options)
    for step, (x, y) in enumerate(digit_batches(20)):
        model.task = step % 2
        optimizer.zero_grad()
        criterion(model(x), y % 2 if model.task else y).backward()
        optimizer.step()
    return tuner


def test_tasks_in_turn_by_an_attribute_are_refused_with_what_to_do():
    with pytest.raises(
        RuntimeError, match=r"on another batch.*attribute that the loop sets.*fsd_batch='same'"
    ) as caught:
        tasks_in_turn()
    assert isinstance(caught.value.__cause__, IndexError)
    assert "\n" not in str(caught.value)
    assert_at_work(tasks_in_turn(fsd_batch="same"))


def test_the_librarys_own_errors_on_another_batch_stay_what_they_are():
    with pytest.raises(apo.MissingBatchError, match="no targets"):
        tasks_in_turn(fsd_batch=[digit_batches(1).__next__()[0]], other_batch_share=0.5)
