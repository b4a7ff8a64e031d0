"""What a loop does to the network's output before the criterion sees it, against a network that does it itself."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.lifecycle.harness import CLASSES, FEATURES, batch, plain_network, sgdm
from torch import Tensor, nn

import apo
from apo.passes.operations import Operation, Output, as_plain, from_plain


class Whole(nn.Module):
    """A network that does to its output what a loop may do."""

    def __init__(self, network: nn.Module, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.change = network, change

    def forward(self, inputs: Tensor) -> Tensor:
        return self.change(self.network(inputs), inputs)


def even_rows(inputs: Tensor) -> Tensor:
    return (inputs.sum(1) * 100).long() % 2 == 0


HALF = torch.tensor([0.5])
CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "temperature": lambda output, inputs: output / 0.5,
    "temperature in a tensor": lambda output, inputs: output / HALF,
    "normalize": lambda output, inputs: 3 * F.normalize(output, dim=1),
    "transpose twice": lambda output, inputs: output.T.clone().T,
    "every other row, doubled": lambda output, inputs: torch.cat([output[::2], output[::2]])[: len(output)],
    "rows by a mask": lambda output, inputs: torch.where(even_rows(inputs)[:, None], output, 2 * output),
    "a cast": lambda output, inputs: output.double(),
    "one of the parts": lambda output, inputs: torch.cat(output.split(1, dim=1)[::-1], dim=1),
    "masked": lambda output, inputs: output.masked_fill(inputs[:, :CLASSES] > 1.5, -3.0),
    "sorted": lambda output, inputs: output.sort(dim=1).values.flip(1),
    "with the input": lambda output, inputs: output + inputs[:, :CLASSES],
    "log_softmax": lambda output, inputs: F.log_softmax(output, dim=-1),
}
#: Where the network runs, and the batch of the function-space term.
PLACES = [("here", "previous"), ("here", "same"), ("autocast", "same"), ("compiled", "previous")]


def train(place: str, change: Callable[[Tensor, Tensor], Tensor], inside: bool, **options: Any) -> apo.Tuner:
    torch.manual_seed(0)
    network = plain_network()
    watched = Whole(network, change) if inside else network
    called = torch.compile(watched, backend="eager") if place == "compiled" else watched
    criterion, optimizer = nn.CrossEntropyLoss(), sgdm(network)
    tuner = apo.attach(optimizer, watched, criterion, interval=3, **options)
    for index in range(7):
        x, y = batch(index)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if place == "autocast" else contextlib.nullcontext():
            output = called(x)
            loss = criterion(output if inside else change(output, x), y)
        loss.backward()
        optimizer.step()
        assert type(output) is type(loss) is Tensor  # as if nobody had followed them
    return tuner


@pytest.mark.parametrize(("place", "fsd_batch"), PLACES)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_the_loop_does_is_what_the_network_would_do(change, place, fsd_batch):
    torch._dynamo.reset()
    between, inside = (train(place, change, inside, fsd_batch=fsd_batch) for inside in (False, True))
    assert list(between.history) == list(inside.history)


@pytest.mark.parametrize(("watched", "find_unused"), [("wrapper", False), ("wrapper", True), ("network", False)])
def test_data_parallelism_changes_nothing(watched, find_unused):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model, criterion = plain_network(), nn.CrossEntropyLoss()
        wrapper = nn.parallel.DistributedDataParallel(model, find_unused_parameters=find_unused)
        optimizer = sgdm(model)
        tuner = apo.attach(optimizer, wrapper if watched == "wrapper" else model, criterion, interval=3)
        for index in range(7):
            x, y = batch(index)
            optimizer.zero_grad()
            criterion(CHANGES["normalize"](wrapper(x), x), y).backward()
            optimizer.step()
    finally:
        torch.distributed.destroy_process_group()
    expected = train("here", CHANGES["normalize"], inside=True).history
    assert tuner.history.column("lr/0") == pytest.approx(expected.column("lr/0"), rel=1e-5)


def test_outputs_of_several_passes_may_be_put_together():
    histories = []
    for together in (True, False):
        torch.manual_seed(0)
        model, criterion = nn.Sequential(plain_network(), nn.Dropout(0.5)), nn.CrossEntropyLoss()
        optimizer = sgdm(model)
        tuner = apo.attach(optimizer, model, criterion, interval=2, fsd_batch="same")
        for index in range(5):
            parts = [batch(index), batch(100 + index)]
            optimizer.zero_grad()
            outputs = [model(x) for x, _ in parts]
            if together:
                criterion(torch.cat(outputs), torch.cat([y for _, y in parts])).backward()
            else:
                losses = [criterion(output, y) for output, (_, y) in zip(outputs, parts, strict=True)]
                ((losses[0] + losses[1]) / 2).backward()
            optimizer.step()
        histories.append(tuner.history)
    for one, other in zip(*histories, strict=True):
        assert one.scalars() == pytest.approx(other.scalars(), rel=1e-4)


def test_one_output_may_be_used_as_it_is_and_changed():
    histories = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = plain_network()
        double = apo.criterion(lambda out, y: F.cross_entropy(out, y) + F.cross_entropy(out / 2, y))
        criterion = double if inside else nn.CrossEntropyLoss()
        options = {"discrepancy": apo.CategoricalKL(), "fsd_weight": 0, "other_batch_share": 0}
        tuner = apo.attach(sgdm(model), model, criterion, interval=2, **options)
        for index in range(5):
            x, y = batch(index)
            tuner.optimizer.zero_grad()
            output = model(x)
            loss = criterion(output, y) if inside else criterion(output, y) + criterion(output / 2, y)
            loss.backward()
            tuner.optimizer.step()
        histories.append(tuner.history)
    for one, other in zip(*histories, strict=True):
        assert one.scalars() == pytest.approx(other.scalars(), rel=1e-4)


def test_a_parameter_may_take_part():
    """A learned temperature that is no part of the network, as in CLIP."""
    torch.manual_seed(0)
    model, criterion, temperature = plain_network(), nn.CrossEntropyLoss(), nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.5)
    tuner = apo.attach(apo.LearningRate.paper(optimizer), model, criterion, interval=1, fsd_batch="same")
    x, y = batch(0)
    criterion(model(x) * temperature, y).backward()
    with torch.no_grad():
        scale = temperature - 0.5 * temperature.grad
        twin = plain_network()
        for mine, other in zip(twin.parameters(), model.parameters(), strict=True):
            mine.copy_(other - 0.5 * other.grad)
    optimizer.step()
    assert tuner.history[0].look_ahead_loss == pytest.approx(criterion(twin(x) * scale, y).item(), rel=1e-5)


def attached(**options: Any) -> tuple[nn.Module, nn.Module, apo.Tuner]:
    torch.manual_seed(0)
    model, criterion = plain_network(), nn.CrossEntropyLoss()
    return model, criterion, apo.attach(sgdm(model), model, criterion, interval=1, **options)


def test_what_was_computed_from_parameters_is_refused():
    model, criterion, tuner = attached()
    x, y = batch(0)
    criterion(model(x) @ model[2].weight @ model[2].weight.T.clone(), y).backward()
    with pytest.raises(apo.ReplayError, match="computed from parameters is used between network and criterion"):
        tuner.optimizer.step()


def test_a_tensor_that_took_part_and_was_changed_is_refused():
    model, criterion, tuner = attached()
    x, y = batch(0)
    scale = torch.ones(CLASSES)
    criterion(model(x) * scale, y).backward()
    scale.mul_(2)
    with pytest.raises(apo.ReplayError, match="used between network and criterion was changed in place"):
        tuner.optimizer.step()


def test_batches_of_another_source_go_through_the_same_change():
    others = [batch(500 + index) for index in range(3)]
    between, inside = (train("here", CHANGES["temperature"], inside, fsd_batch=others) for inside in (False, True))
    assert list(between.history) == list(inside.history)


def test_batches_of_another_source_cannot_go_through_a_mask_of_this_batch():
    with pytest.raises(apo.ReplayError, match=r"fsd_batch must be 'previous' or 'same'.*into the criterion"):
        train("here", CHANGES["masked"], inside=False, fsd_batch=[batch(500)])


def test_an_output_that_is_saved_holds_no_class_of_apo():
    model, _, _ = attached()
    output = model(batch(0)[0])
    file = io.BytesIO()
    torch.save({"output": output, "loss": 2 * output}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["loss"].shape == output.shape


def test_an_output_that_is_used_for_something_else_is_an_ordinary_tensor():
    model, _, _ = attached()
    output = model(torch.randn(4, FEATURES))
    assert type(output.detach()) is type(output.argmax(1)) is Tensor
    assert isinstance(output.sum().item(), float)
    assert output.detach().numpy().shape == (4, CLASSES)
    with torch.no_grad():
        assert type(output * 2) is Tensor


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_run_that_is_resumed_right_before_a_meta_step_continues_as_it_would_have(change):
    def run(interrupted: bool) -> list[Any]:
        torch.manual_seed(0)
        model, criterion = plain_network(), nn.CrossEntropyLoss()
        tuner = apo.attach(sgdm(model), model, criterion, interval=3)
        for index in range(7):
            if interrupted and index == 3:
                file = io.BytesIO()
                torch.save((model.state_dict(), tuner.state_dict()), file)
                file.seek(0)
                weights, state = torch.load(file, weights_only=True)
                model = plain_network()
                model.load_state_dict(weights)
                tuner = apo.attach(sgdm(model), model, criterion, interval=3)
                tuner.load_state_dict(state)
            x, y = batch(index)
            tuner.optimizer.zero_grad()
            criterion(change(model(x), x), y).backward()
            tuner.optimizer.step()
        return list(tuner.history)

    assert run(interrupted=True) == run(interrupted=False)


def test_a_file_can_name_no_function_that_is_not_one_of_tensors():
    plain = as_plain(Operation(torch.Tensor.__getitem__, (Output(0), (slice(None), ..., 1)), {}))
    assert from_plain(plain).run([torch.arange(6).reshape(2, 3)]).tolist() == [1, 4]
    with pytest.raises(KeyError):
        from_plain(plain | {"function": "torch.hub.load"})
