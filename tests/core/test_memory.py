"""Meta-steps keep no graph and no tensor alive."""

import gc
import itertools
import tracemalloc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import apo


def start(door, rule, **options):
    model, criterion = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), nn.CrossEntropyLoss()
    settings = {"interval": 1, "history_limit": 5} | options
    if door == "explicit":
        tuner = apo.APO(rule(model), model, criterion=criterion, **settings)
        return tuner, tuner.step

    tuner = apo.attach(rule(model), model, criterion, **settings)

    def step(x, y):
        tuner.optimizer.zero_grad()
        criterion(model(x), y).backward()
        tuner.optimizer.step()

    return tuner, step


def learning_rate(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def preconditioned(model):
    warmup = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return apo.Preconditioned(apo.Kronecker(model, lr=0.1, warmup=warmup, warmup_steps=5, momentum=0.5))


def rate_and_momentum(model):
    return apo.RateAndMomentum(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5))


# The labels are random: there is nothing to learn, and apo says so.
pytestmark = pytest.mark.filterwarnings("ignore::apo.ApoWarning")

every_door = pytest.mark.parametrize("door", ["explicit", "attach"])
every_rule = pytest.mark.parametrize("rule", [learning_rate, preconditioned, rate_and_momentum])


def live_tensors():
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def kept_memory():
    """Returns the bytes that are allocated now, but for what calls of torch's own operators leave in their caches."""
    gc.collect()
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, torch._ops.__file__)])
    return sum(trace.size for trace in snapshot.traces)


class Sentinel:
    """Dies with the node of the graph that holds it."""


def run(step, count):
    for _ in range(count):
        step(torch.randn(6, 3), torch.randint(2, (6,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "door", "count"),
    [
        (learning_rate, "explicit", 2000),
        (learning_rate, "attach", 1000),
        (preconditioned, "explicit", 1000),
        (rate_and_momentum, "attach", 1000),
    ],
)
def test_thousands_of_meta_steps_do_not_grow_memory(rule, door, count):
    tuner, step = start(door, rule)
    run(step, 100)
    meta = tuner.rule.meta_optimizer.state  # which is built when it is first needed
    tensors = live_tensors() - sum(map(len, meta.values()))
    run(step, count - 900)
    tracemalloc.start()
    run(step, 400)  # torch and the interpreter fill small caches of fixed size
    kept = [kept_memory()]
    for _ in range(4):
        run(step, 100)
        kept.append(kept_memory())
    tracemalloc.stop()
    assert tuner.steps == len(tuner.history) + count - 5 == count
    assert live_tensors() - sum(map(len, meta.values())) <= tensors
    # A leak grows all the time; a dictionary of the interpreter, say, doubles now and then.
    growth = min(after - before for before, after in itertools.pairwise(kept))
    assert growth < 100 * 100, "more than a hundred bytes a meta-step stay behind"


@every_door
@every_rule
@pytest.mark.parametrize("options", [{}, {"fsd_batch": "same"}, {"fsd_weight": 0.0}], ids=["previous", "same", "none"])
def test_every_output_and_its_graph_die_with_the_step(rule, door, options):
    tuner, step = start(door, rule, **options)
    outputs, graphs = [], []

    def watch(module, args, output):
        outputs.append(weakref.ref(output))
        if output.grad_fn is not None:
            output.grad_fn.metadata["sentinel"] = sentinel = Sentinel()  # a node itself takes no weak reference
            graphs.append(weakref.ref(sentinel))

    tuner.model[-1].register_forward_hook(watch)
    gc.disable()  # nothing may depend on the collector of cycles: graphs are large
    try:
        run(step, 3)
        alive = [reference for reference in (*outputs, *graphs) if reference() is not None]
    finally:
        gc.enable()
    assert len(outputs) >= 6 and len(graphs) >= 6
    assert not alive


def test_the_records_are_plain_numbers():
    tuner, step = start("explicit", learning_rate)
    run(step, 3)
    for record in tuner.history:
        assert all(type(value) is float for value in record.scalars().values())


def test_the_history_keeps_no_more_than_its_limit():
    tuner, step = start("explicit", learning_rate)
    run(step, 9)
    assert [record.step for record in tuner.history] == [4, 5, 6, 7, 8]


def test_a_detached_tuner_can_be_collected():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tuner = apo.APO(optimizer, model, criterion=F.cross_entropy, interval=1)
    tuner.step(torch.randn(4, 3), torch.randint(2, (4,)))
    tuner.detach()
    reference = weakref.ref(tuner)
    del tuner
    gc.collect()
    assert reference() is None
