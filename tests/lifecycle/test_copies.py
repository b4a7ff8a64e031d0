from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from tests.lifecycle.harness import (
    DOORS,
    RULES,
    Loader,
    Run,
    assert_equal_bits,
    assert_same_run,
    batch,
    network_with_dropout_and_batchnorm,
    plain_network,
    saved_and_loaded,
)
from torch import nn

import apo


def copied(run: Run) -> Run:
    twin = copy.copy(run)
    memo: dict = {}
    twin.tuner = copy.deepcopy(run.tuner, memo)
    twin.model = twin.tuner.model
    if isinstance(run.tuner, apo.Attached):
        twin.criterion = twin.tuner._criterion
    return twin


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("door", DOORS)
def test_a_copied_tuner_is_a_run_of_its_own_that_goes_on_alike(door, rule):
    run = Run(door, rule, network_with_dropout_and_batchnorm).train(range(5))
    twin = copied(run)
    assert not {id(p) for p in run.model.parameters()} & {id(p) for p in twin.model.parameters()}
    before = run.weights()
    torch.manual_seed(7)
    twin.train(range(5, 11))
    assert_equal_bits(before, run.weights())
    assert (run.tuner.steps, twin.tuner.steps) == (5, 11)
    torch.manual_seed(7)
    run.train(range(5, 11))
    assert_same_run(run, twin)


@pytest.mark.parametrize("source", [lambda: [batch(500), batch(501), batch(502)], Loader])
def test_a_copied_tuner_draws_the_same_batches_next(source):
    run = Run("explicit", fsd_batch=source()).train(range(5))
    twin = copied(run)
    assert_same_run(run.train(range(5, 12)), twin.train(range(5, 12)))


@pytest.mark.parametrize("door", DOORS)
def test_a_copied_tuner_can_be_detached_on_its_own(door):
    run = Run(door).train(range(2))
    twin = copied(run)
    twin.tuner.detach()
    run.train(range(2, 7))
    assert len(run.tuner.history) == 3
    assert type(twin.optimizer.param_groups[0]) is dict


@pytest.mark.parametrize("rule", ["sgdm", "kronecker"])
def test_a_copy_of_the_network_is_inert(rule):
    plain, averaged = Run("attached", rule).train(range(7)), Run("attached", rule)
    average = torch.optim.swa_utils.AveragedModel(averaged.model)
    shadow = copy.deepcopy(averaged.model)
    for index in range(7):
        averaged.step(*averaged.batch(index))
        average.update_parameters(averaged.model)
        shadow(averaged.batch(index)[0]).sum().backward()  # its passes are not the tuner's business
    assert_same_run(plain, averaged)
    before = averaged.weights()
    torch.optim.SGD(shadow.parameters(), lr=0.1).step()
    assert_equal_bits(before, averaged.weights())


def test_a_copy_of_the_optimizer_is_an_ordinary_one():
    run = Run("attached").train(range(4))
    twin = copy.deepcopy(run.optimizer)
    assert float(twin.param_groups[0]["lr"]) == run.lr
    weights = twin.param_groups[0]["params"]
    expected = [torch.sub(p.detach(), 0.9 * twin.state[p]["momentum_buffer"] + 1.0, alpha=run.lr) for p in weights]
    for p in weights:
        p.grad = torch.ones_like(p)
    before = run.weights()
    twin.step()
    assert_equal_bits(before, run.weights())
    for p, value in zip(weights, expected, strict=True):
        torch.testing.assert_close(p.detach(), value)
    assert len(run.tuner.history) == 2


def test_a_copy_of_the_optimizer_can_have_a_tuner_of_its_own():
    run = Run("attached").train(range(4))
    model, optimizer = copy.deepcopy((run.model, run.optimizer))
    with pytest.warns(apo.ApoWarning, match="has taken steps before"):
        tuner = apo.attach(optimizer, model, run.criterion, interval=1)
    assert tuner.rule.learned_rates() == pytest.approx([run.lr])
    optimizer.zero_grad()
    run.criterion(model(run.batch(0)[0]), run.batch(0)[1]).backward()
    optimizer.step()
    assert len(tuner.history) == 1


@pytest.mark.parametrize("save", ["torch.save", "pickle"])
def test_an_attached_network_can_be_saved_whole_and_is_inert_when_loaded(save):
    run = Run("attached").train(range(2))
    if save == "pickle":
        loaded = pickle.loads(pickle.dumps(run.model))
    else:
        file = io.BytesIO()
        torch.save(run.model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    assert_equal_bits(run.weights(), list(loaded.state_dict().values()))
    loaded(run.batch(0)[0]).sum().backward()
    run.train(range(2, 5))
    assert len(run.tuner.history) == 2


def test_an_attached_optimizer_can_be_pickled_as_an_ordinary_one():
    run = Run("attached").train(range(2))
    loaded = pickle.loads(pickle.dumps(run.optimizer))
    assert type(loaded.param_groups[0]) is dict
    assert type(loaded.param_groups[0]["lr"]) is float
    assert loaded.param_groups[0]["lr"] == run.lr


@pytest.mark.parametrize("rule", ["sgdm", "adam", "kronecker"])
def test_the_optimizers_state_loads_into_a_bare_optimizer(rule):
    run = Run("attached", rule).train(range(4))
    state = saved_and_loaded(run.optimizer.state_dict())
    model = plain_network()
    bare = RULES[rule](model)
    bare.load_state_dict(state)
    assert type(state["param_groups"][0]["lr"]) is float
    assert bare.param_groups[0]["lr"] == run.lr


def test_the_networks_state_dict_knows_nothing_of_apo():
    run = Run("attached").train(range(4))
    assert run.model.state_dict().keys() == plain_network().state_dict().keys()
    nn.Sequential(run.model).load_state_dict({f"0.{k}": v for k, v in run.model.state_dict().items()})


def test_a_network_that_is_saved_while_attached_is_saved_as_if_it_were_not():
    run = Run("attached").train(range(2))
    run.model.register_forward_hook(print)  # somebody else's stays
    bare = plain_network()
    bare.register_forward_hook(print)
    bare.load_state_dict(run.model.state_dict())
    layers = [nn.Sequential, nn.Linear, nn.Tanh]
    with torch.serialization.safe_globals([*layers, print]):
        loaded = saved_and_loaded(run.model)
    assert vars(loaded).keys() == vars(bare).keys()
    for name, value in vars(bare).items():
        assert isinstance(value, nn.Module | dict) or getattr(loaded, name) == value
        assert not isinstance(value, dict) or len(value) == len(getattr(loaded, name)), name
    run.train(range(2, 5))
    assert len(run.tuner.history) == 2


def test_a_network_that_says_itself_how_it_is_saved_is_asked():
    class Own(nn.Linear):
        def __getstate__(self):
            return {**vars(self), "note": "saved"}

    model, criterion = Own(6, 3), nn.CrossEntropyLoss()
    tuner = apo.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, criterion)
    twin = copy.deepcopy(model)
    assert twin.note == "saved" and not twin._forward_hooks and "__getstate__" not in vars(twin)
    tuner.detach()
    assert "__getstate__" not in vars(model)


def test_the_criterion_is_saved_as_if_it_were_not_watched():
    run = Run("attached", loss=nn.CrossEntropyLoss()).train(range(2))
    loaded = pickle.loads(pickle.dumps(run.criterion))
    assert not loaded._forward_hooks and not loaded._forward_hooks_with_kwargs
