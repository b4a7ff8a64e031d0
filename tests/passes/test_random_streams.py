"""Python's and NumPy's random numbers in a forward pass: the same in a replay, and given back afterwards."""

import random
import sys

import pytest
from tests.lifecycle.harness import Run, plain_network, saved_and_loaded
from torch import nn

from apo.passes.isolation import PassState, RandomState, every_module


def numpy_uniform():
    return pytest.importorskip("numpy.random").uniform()


class Log(list):
    """A list that a meta-step does not put back, unlike the attributes that a network keeps its state in."""


class Noisy(nn.Module):
    """Scales its outputs by a random number that is not torch's, and remembers it."""

    def __init__(self, draw):
        super().__init__()
        self.body, self.draw, self.drawn = plain_network(), draw, Log()

    def forward(self, inputs):
        self.drawn.append(self.draw())
        return self.body(inputs) * (1 + self.drawn[-1])


DRAWS = {"python": random.random, "python gauss": lambda: random.gauss(0, 1), "numpy": numpy_uniform}
DOORS = ["explicit", "attached"]


@pytest.fixture(autouse=True)
def seeds():
    """Draws scale the network's outputs: an unlucky one would leave nothing to learn."""
    random.seed(0)
    pytest.importorskip("numpy.random").seed(0)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("door", DOORS)
def test_a_replay_draws_what_training_drew_and_the_stream_goes_on_as_without_it(door, draw):
    draw()
    run = Run(door, network=lambda: Noisy(draw), interval=100)
    state = RandomState.capture(())
    run.train(range(3))
    after = draw()
    first, *_, second, third = run.model.drawn
    assert len(run.model.drawn) > 5
    assert run.model.drawn.count(first) > 1  # B at the look-ahead
    state.restore()
    assert [draw() for _ in range(4)] == [first, second, third, after]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_streams_come_back_from_a_checkpoint(draw):
    draw()
    run = Run("explicit").train(range(2))
    state = saved_and_loaded(run.tuner.state_dict())
    expected = [draw() for _ in range(3)]
    run.tuner.load_state_dict(state)
    assert [draw() for _ in range(3)] == expected


def test_a_checkpoint_from_before_they_were_saved_leaves_them_alone():
    state = {name: value for name, value in RandomState.capture(()).state_dict().items() if name in ("cpu", "cuda")}
    before = random.getstate()
    RandomState.from_state_dict(state).restore()
    assert random.getstate() == before


def test_numpy_is_not_imported_for_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy.random", raising=False)
    state = RandomState.capture(())
    state.restore()
    assert state.numpy is None
    assert "numpy.random" not in sys.modules


def forward_of_its_own(network, draw):
    forward = network.forward
    network.forward = lambda inputs: forward(inputs) * (1 + draw())


def hook_inside(network, draw):
    network[0].register_forward_hook(lambda module, inputs, output: output * (1 + draw()))


def hook_before(network, draw):
    network[-1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * (1 + draw()),))


def module_inside(network, draw):
    network.append(Noisy(draw))
    network[-1].body = nn.Identity()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("make_noisy", [forward_of_its_own, hook_inside, hook_before, module_inside])
def test_streams_of_the_host_come_back_wherever_a_network_of_torch_draws_from_them(door, make_noisy):
    run = Run(door, interval=100)
    make_noisy(run.model, random.random)
    before = random.getstate()
    run.train(range(3))
    after = random.random()
    random.setstate(before)
    assert [random.random() for _ in range(4)][-1] == after  # one draw for each training pass


def test_streams_of_the_host_are_not_read_for_modules_of_torch_alone():
    network = nn.Sequential(nn.Linear(2, 2), nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), nn.Dropout())
    assert not PassState.capture(every_module([network])).random.has_host
    network[0].register_forward_hook(lambda module, inputs, output: None)
    assert PassState.capture(every_module([network])).random.has_host
