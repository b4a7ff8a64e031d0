from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.lifecycle.harness import CLASSES, DOORS, FEATURES, Run, assert_equal_bits, assert_same_run, batch, sgdm
from torch import Tensor, nn

import apo


class ModelOutput(OrderedDict):
    """What Hugging Face's networks return: an ordered mapping whose entries are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key: Any) -> Any:
        return tuple(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


class Pair(NamedTuple):
    logits: Tensor
    hidden: Tensor


class Network(nn.Module):
    """A small network with a choice of how it returns its outputs."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.first(inputs).tanh()
        logits = self.second(hidden)
        if labels is not None:
            loss = F.cross_entropy(logits, labels)
            forms = {"model output": ModelOutput, "dict": dict}
            return forms[self.form](loss=loss, logits=logits)
        return {
            "tensor": logits,
            "tuple": (logits, hidden),
            "list": [logits, None],
            "named tuple": Pair(logits, hidden),
            "dict": {"logits": logits, "hidden": hidden},
            "model output": ModelOutput(logits=logits, hidden=hidden),
        }[self.form]


def pick(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output["logits"] if isinstance(output, dict) else output[0]


FORMS = ["tensor", "tuple", "list", "named tuple", "dict", "model output"]


def reference() -> Run:
    return Run("explicit", network=lambda: Network("tensor")).train(range(7))


@pytest.mark.parametrize("form", FORMS)
def test_the_criterion_may_take_one_of_several_outputs(form):
    run = Run("attached", network=lambda: Network(form))
    for index in range(7):
        inputs, target = run.batch(index)
        run.optimizer.zero_grad()
        run.criterion(pick(run.model(inputs)), target).backward()
        run.optimizer.step()
    assert_same_run(run, reference())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fsd_batch", ["previous", "same"])
def test_the_loss_may_take_the_whole_output(form, fsd_batch):
    def loss(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(pick(output), target)

    options = {"discrepancy": apo.CategoricalKL(output=pick), "fsd_batch": fsd_batch}
    runs = [Run(door, network=lambda: Network(form), loss=loss, **options).train(range(7)) for door in DOORS]
    plain = Run("explicit", network=lambda: Network("tensor"), fsd_batch=fsd_batch).train(range(7))
    assert_same_run(runs[0], plain)
    assert_same_run(runs[1], plain)


@pytest.mark.parametrize("form", ["dict", "model output"])
@pytest.mark.parametrize("fsd_batch", ["previous", "same"])
@pytest.mark.parametrize("door", DOORS)
def test_a_network_may_return_its_own_loss(door, form, fsd_batch):
    torch.manual_seed(0)
    model = Network(form)
    optimizer = sgdm(model)
    if door == "explicit":
        tuner: apo.Tuner = apo.APO(optimizer, model, interval=3, fsd_batch=fsd_batch)
    else:
        tuner = apo.attach(optimizer, model, interval=3, fsd_batch=fsd_batch)
    for index in range(7):
        inputs, target = batch(index)
        if isinstance(tuner, apo.APO):
            tuner.step({"inputs": inputs, "labels": target})
        else:
            optimizer.zero_grad()
            model(inputs=inputs, labels=target)["loss"].backward()
            optimizer.step()
    plain = Run(door, network=lambda: Network("tensor"), fsd_batch=fsd_batch).train(range(7))
    assert_equal_bits([p.detach() for p in model.parameters()], plain.weights())
    assert list(tuner.history) == list(plain.tuner.history)


class Language(nn.Module):
    """Predicts the next token at every position: outputs ``[batch, time, tokens]``."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.flat = flat
        self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.embed(tokens).cumsum(1).tanh())
        return logits.reshape(-1, 7) if self.flat else logits


def tokens(index: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(index))
    return text[:, :-1], text[:, 1:]


def test_the_criterion_may_take_a_reshaped_output():
    runs = [Run("attached", network=Language), Run("attached", network=lambda: Language(flat=True))]
    for index in range(7):
        text, target = tokens(index)
        for run in runs:
            run.optimizer.zero_grad()
            run.criterion(run.model(text).view(-1, 7), target.reshape(-1)).backward()
            run.optimizer.step()
    assert_same_run(*runs)
    assert runs[0].tuner.history[-1].fsd > 0


def test_a_squeezed_output_is_a_reshaped_one():
    torch.manual_seed(0)
    model, criterion = nn.Linear(FEATURES, 1), nn.MSELoss()
    tuner = apo.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, criterion, interval=1)
    for index in range(3):
        inputs, target = batch(index, size=16 if index else 5)  # B' of another size than B
        tuner.optimizer.zero_grad()
        criterion(model(inputs).squeeze(-1), target.float()).backward()
        tuner.optimizer.step()
    assert len(tuner.history) == 3


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor, *, scale: float = 1.0, shift: Tensor | None = None) -> Tensor:
        output = scale * self.layer(inputs)
        return output if shift is None else output + shift


def test_keyword_arguments_of_network_and_criterion_are_repeated():
    torch.manual_seed(0)
    model, criterion = TwoInputs(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    rule = apo.LearningRate.paper(optimizer)
    tuner = apo.attach(rule, model, criterion, interval=1, fsd_weight=0)
    inputs, target = batch(0)
    shift = torch.tensor([1.0, -1.0, 0.5])
    criterion(target=target, input=model(inputs, scale=2.0, shift=shift)).backward()
    with torch.no_grad():
        weight, bias = (p - 0.5 * p.grad for p in model.parameters())
    optimizer.step()
    expected = F.cross_entropy(2.0 * F.linear(inputs, weight, bias) + shift, target)
    assert tuner.history[0].look_ahead_loss == pytest.approx(expected.item(), rel=1e-5)


def test_a_loss_over_two_passes_is_repeated_with_both():
    torch.manual_seed(0)
    model, criterion = nn.Linear(FEATURES, 4), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tuner = apo.attach(apo.LearningRate.paper(optimizer), model, criterion, interval=1, fsd_batch="same")
    left, right = batch(0)[0], batch(1)[0]
    model(batch(2)[0])  # a pass that the loss does not use
    criterion(model(left), model(right)).backward()
    with torch.no_grad():
        weight, bias = (p - 0.5 * p.grad for p in model.parameters())
    optimizer.step()
    expected = F.mse_loss(F.linear(left, weight, bias), F.linear(right, weight, bias))
    assert tuner.history[0].look_ahead_loss == pytest.approx(expected.item(), rel=1e-5)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return 2 * value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda output: output.div_(2.0),
        lambda output: output.div_(2.0) * 3,
        lambda output: F.dropout(output, 0.5),
        lambda output: F.batch_norm(output, torch.zeros(CLASSES), torch.ones(CLASSES), training=True),
        lambda output: Doubled.apply(output),
    ],
    ids=["changed in place", "made of that", "random", "with an effect", "a function of autograd"],
)
def test_a_criterion_on_something_that_cannot_be_repeated_is_refused(change):
    run = Run("attached")
    inputs, _ = run.batch(0)
    run.criterion(change(run.model(inputs)), torch.zeros(16, dtype=torch.long)).backward()
    before = run.weights()
    with pytest.raises(
        apo.ReplayError, match=r"made of an output of the network .* cannot be repeated.*into the criterion"
    ):
        run.optimizer.step()
    assert_equal_bits(before, run.weights())


@pytest.mark.parametrize("door", DOORS)
def test_a_batch_that_the_network_changes_in_place_is_refused(door):
    class Greedy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.sub_(1.0))

    run = Run(door, network=lambda: Greedy(FEATURES, CLASSES))
    with pytest.raises(apo.ReplayError, match=r"changed in place by the network or before optimizer\.step"):
        run.step(*run.batch(0))


@pytest.mark.parametrize("door", DOORS)
def test_a_batch_that_is_changed_before_the_step_is_refused(door):
    run = Run(door)
    inputs, target = run.batch(0)
    run.backward(inputs, target)
    inputs.zero_()
    with pytest.raises(apo.ReplayError, match="clone it before changing it"):
        run.update()


@pytest.mark.parametrize("door", DOORS)
def test_the_memory_of_a_batch_may_be_used_again_after_the_step(door):
    fresh, reused = Run(door), Run(door)
    inputs, target = reused.batch(0)
    for index in range(7):
        fresh.step(*fresh.batch(index))
        inputs.copy_(fresh.batch(index)[0])
        target.copy_(fresh.batch(index)[1])
        reused.step(inputs, target)
    assert_same_run(fresh, reused)
