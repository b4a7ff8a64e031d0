"""What happens around ``optimizer.step()``: closures, several optimizers, groups, accumulation, precision, streams."""

from __future__ import annotations

import io
from contextlib import nullcontext

import pytest
import torch
from tests.loops.loop import (
    Run,
    assert_at_work,
    assert_learns,
    assert_not_silently_lost,
    digit_batches,
    digits,
    mlp,
    wrong,
)
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, IterableDataset

import apo

SGD_RATES = [0.1, 0.3]
ADAM_RATES = [3e-3, 1e-2]


def sgdm(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def test_a_closure_ends_near_the_best_rate():
    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = sgdm(model, lr)
        tuner, start = attach(optimizer, model, criterion), wrong(model)
        for x, y in digit_batches(200):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        return Run(start, wrong(model), tuner)

    assert_learns(loop, SGD_RATES, short=0.05)


def test_two_optimizers_for_the_two_halves_of_a_network_both_learn():
    others = []

    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        body = torch.optim.SGD(model[0].parameters(), lr=lr, momentum=0.9)
        head = torch.optim.Adam(model[2].parameters(), lr=lr / 10)
        tuner, start = attach(body, model, criterion), wrong(model)
        others.append(attach(head, model, criterion))
        for x, y in digit_batches(200):
            body.zero_grad()
            head.zero_grad()
            criterion(model(x), y).backward()
            body.step()
            head.step()
        return Run(start, wrong(model), tuner)

    assert_learns(loop, SGD_RATES, short=0.05)
    assert_at_work(others[-1], 1e-7)


def test_groups_with_and_without_decay_keep_the_ratio_of_their_rates():
    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0, "lr": 2 * lr}]
        optimizer = torch.optim.AdamW(groups, lr=lr)
        tuner, start = attach(optimizer, model, criterion), wrong(model)
        for x, y in digit_batches(200):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        assert optimizer.param_groups[1]["lr"] == pytest.approx(2 * optimizer.param_groups[0]["lr"])
        return Run(start, wrong(model), tuner)

    assert_learns(loop, ADAM_RATES, short=0.05)


def test_accumulated_and_clipped_gradients_end_near_the_best_rate():
    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = sgdm(model, lr)
        tuner, start = attach(optimizer, model, criterion), wrong(model)
        for index, (x, y) in enumerate(digit_batches(600, size=16)):
            (criterion(model(x), y) / 4).backward()
            if index % 4 == 3:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return Run(start, wrong(model), tuner)

    assert_learns(loop, SGD_RATES, short=0.05)


def test_a_scaler_that_is_switched_off_and_bfloat16_autocast_end_near_the_best_rate():
    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer, scaler = sgdm(model, lr), torch.amp.GradScaler("cpu", enabled=False)
        tuner, start = attach(optimizer, model, criterion, scaler=scaler), wrong(model)
        for x, y in digit_batches(150):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
        return Run(start, wrong(model), tuner)

    assert_learns(loop, SGD_RATES, short=0.05)


def test_a_stream_without_length_ends_near_the_best_rate():
    class Stream(IterableDataset):
        def __iter__(self):
            generator = torch.Generator().manual_seed(1)
            inputs, labels = digits()[:2]
            while True:
                index = int(torch.randint(len(labels), (), generator=generator))
                yield inputs[index], labels[index]

    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        tuner, start = attach(optimizer, model, criterion), wrong(model)
        for step, (x, y) in enumerate(DataLoader(Stream(), batch_size=32)):
            if step == 150:
                break
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        return Run(start, wrong(model), tuner)

    assert_learns(loop, ADAM_RATES, short=0.06)


def trained(optimizer, model, criterion, data):
    for x, y in data:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_run_that_is_saved_and_loaded_half_way_ends_near_the_best_rate():
    def loop(lr, attach):
        data, criterion = list(digit_batches(200)), nn.CrossEntropyLoss()
        model = mlp()
        optimizer, start = sgdm(model, lr), wrong(model)
        attach(optimizer, model, criterion)
        trained(optimizer, model, criterion, data[:95])
        saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        rate, model = float(optimizer.param_groups[0]["lr"]), mlp()
        optimizer = sgdm(model, lr)
        tuner = attach(optimizer, model, criterion)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert float(optimizer.param_groups[0]["lr"]) == rate
        trained(optimizer, model, criterion, data[95:])
        return Run(start, wrong(model), tuner)

    assert_learns(loop, SGD_RATES, short=0.05)


def resumed(attach_first, made_with_apo):
    """Train for 50 steps, load the file into a new optimizer, and return the file's rate and that after one step."""
    data, criterion, model = list(digit_batches(51)), nn.CrossEntropyLoss(), mlp()
    optimizer = sgdm(model, 1e-6 if made_with_apo else 2e-3)
    if made_with_apo:
        apo.attach(optimizer, model, criterion)
    trained(optimizer, model, criterion, data[:50])
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    rate, model = float(optimizer.param_groups[0]["lr"]), mlp()
    model.load_state_dict(saved["model"])
    optimizer = sgdm(model, 1.0)
    if attach_first:
        tuner = apo.attach(optimizer, model, criterion)
        optimizer.load_state_dict(saved["optimizer"])
    else:
        optimizer.load_state_dict(saved["optimizer"])
        tuner = apo.attach(optimizer, model, criterion)
    trained(optimizer, model, criterion, data[50:])
    assert len(tuner.history) > 0
    return rate, float(optimizer.param_groups[0]["lr"])


#: A meta-step changes the rate by at most a fifth of a natural logarithm.
ONE_META_STEP = pytest.approx(0.0, abs=0.2001)


FILES = {
    "attach, then load a plain file": (True, False),
    "attach, then load a file made with apo": (True, True),
    "load a plain file, then attach": (False, False),
    "load a file made with apo, then attach": (False, True),
}


@pytest.mark.parametrize("name", FILES)
def test_a_rate_from_a_file_is_kept(name):
    unsure = name == "load a plain file, then attach"
    says = (
        pytest.warns(apo.ApoWarning, match="taken steps before, so its rate 0.002 is kept") if unsure else nullcontext()
    )
    with says:
        before, after = resumed(*FILES[name])
    assert torch.tensor(after / before).log().item() == ONE_META_STEP, f"{before:.3g} became {after:.3g}"


def test_functional_call_on_the_networks_own_parameters_ends_near_the_best_rate():
    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = sgdm(model, lr)
        tuner, start = attach(optimizer, model, criterion), wrong(model)
        for x, y in digit_batches(150):
            optimizer.zero_grad()
            criterion(functional_call(model, dict(model.named_parameters()), (x,)), y).backward()
            optimizer.step()
        return Run(start, wrong(model), tuner)

    assert_learns(loop, SGD_RATES, short=0.05)


def test_functional_call_on_tensors_of_ones_own_works_or_is_refused():
    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        weights = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
        optimizer = torch.optim.SGD(weights.values(), lr=lr, momentum=0.9)
        tuner, start = attach(optimizer, model, criterion), wrong(model)
        for x, y in digit_batches(150):
            optimizer.zero_grad()
            criterion(functional_call(model, weights, (x,)), y).backward()
            optimizer.step()
        return Run(start, wrong(lambda x: functional_call(model, weights, (x,))), tuner)

    assert_not_silently_lost(loop, SGD_RATES, initial=1e-3, short=0.05, about="parameter")


def test_an_optimizer_of_another_networks_parameters_is_refused():
    model, another = mlp(), mlp()
    with pytest.raises(ValueError, match=r"optimizer.*parameters.*(model|network)"):
        apo.attach(sgdm(another, 0.1), model, nn.CrossEntropyLoss())


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_optimizer_step_works_or_is_refused(when):
    def loop(lr, attach):
        torch._dynamo.reset()
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = sgdm(model, lr)
        if when == "before":
            step = torch.compile(optimizer.step, backend="eager")
            tuner = attach(optimizer, model, criterion)
        else:
            tuner = attach(optimizer, model, criterion)
            step = torch.compile(optimizer.step, backend="eager")
        start = wrong(model)
        for x, y in digit_batches(150):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            step()
        return Run(start, wrong(model), tuner)

    assert_not_silently_lost(loop, SGD_RATES, initial=1e-5, short=0.05, about="compile")
