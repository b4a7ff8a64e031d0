from __future__ import annotations

import copy
import types

import pytest
import torch
from tests.integrations.frameworks import assert_identical, assert_same_curves, example, history_of, plain_loop
from torch import nn

import apo

accelerate = pytest.importorskip("accelerate")
from apo.integrations import accelerate as apo_accelerate  # noqa: E402

pytestmark = pytest.mark.integrations


@pytest.fixture(scope="module")
def digits():
    return example("accelerate_digits")


@pytest.fixture(autouse=True)
def _fresh_state():
    """Accelerators share their state: without this, a test would inherit the precision of the one before it."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def network():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 3))


def batches(count=30):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)]


class Script:
    """A training script with Accelerate."""

    def __init__(self, model, attach="after", schedule=None, **options):
        self.accelerator = accelerate.Accelerator(cpu=True, **options)
        self.criterion = nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        if attach == "before":
            self.tuner = apo.attach(optimizer, model, self.criterion, interval=5)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.scheduler = schedule(self.optimizer) if schedule else None
        if attach == "after":
            self.tuner = apo_accelerate.attach(self.accelerator, self.optimizer, self.model, self.criterion, interval=5)

    def train(self, batches):
        for x, y in batches:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.criterion(self.model(x), y))
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.scheduler:
                    self.scheduler.step()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_example_trains_as_the_plain_loop_does(digits, accumulate):
    model = digits.network()
    twin = copy.deepcopy(model)
    tuner = digits.train(model, epochs=3, accumulate=accumulate)
    loader = digits.loader("train")
    reference = plain_loop(twin, [list(loader) for _ in range(3)], accumulate)
    assert_same_curves(tuner, reference)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_example_learns_the_digits(digits, capsys):
    accuracy = digits.main(epochs=5)
    assert accuracy > 0.9
    assert f"test accuracy {accuracy:.1%}" in capsys.readouterr().out


def test_attaching_before_and_after_prepare_is_the_same():
    before, after = network(), network()
    after.load_state_dict(before.state_dict())
    scripts = [Script(before, "before"), Script(after, "after")]
    for script in scripts:
        torch.manual_seed(3)
        script.train(batches())
    assert history_of(scripts[0].tuner) == history_of(scripts[1].tuner) != []
    assert_identical(before, after)


@pytest.mark.parametrize("attach", ["before", "after"])
def test_resume_from_a_saved_state_of_accelerate_is_exact(tmp_path, attach):
    whole, other = network(), network()
    script = Script(whole, attach, gradient_accumulation_steps=2)
    script.train(batches(14))
    script.accelerator.save_state(tmp_path)
    script.train(batches()[14:])
    resumed = Script(other, attach, gradient_accumulation_steps=2)
    resumed.accelerator.load_state(tmp_path)
    resumed.train(batches()[14:])
    assert_identical(whole, other)
    assert history_of(script.tuner) == history_of(resumed.tuner)
    assert resumed.tuner.steps == 15


@pytest.mark.parametrize("attach", ["before", "after"])
def test_schedule_built_on_the_wrapped_optimizer_multiplies_the_learned_rate(attach):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    script = Script(network(), attach, schedule)
    script.train(batches(12))
    learned = script.tuner.rule.learned_rates()[0]
    assert script.optimizer.param_groups[0]["lr"] == pytest.approx(learned / 13)
    state = script.optimizer.state_dict()
    script.optimizer.load_state_dict(state)  # makes new param groups: the schedule is still known
    script.train(batches(1))
    assert script.optimizer.param_groups[0]["lr"] == pytest.approx(script.tuner.rule.learned_rates()[0] / 14)


def test_every_meta_step_reaches_the_trackers():
    script = Script(network())
    logged = []
    script.accelerator.log = lambda values, step: logged.append((step, values["apo/lr/0"]))
    script.train(batches(11))
    assert logged == [(record.step, record.lr[0]) for record in script.tuner.history]
    assert [step for step, _ in logged] == [0, 5, 10]


def test_bfloat16_of_accelerate_is_in_force_in_the_repeated_passes():
    model, seen = network(), []
    model[0].register_forward_hook(lambda layer, args, output: seen.append(output.dtype))
    Script(model, mixed_precision="bf16").train(batches(1))
    assert len(seen) > 3 and set(seen) == {torch.bfloat16}


def test_scaler_and_rule_reach_the_tuner():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    tuner = apo_accelerate.attach(
        types.SimpleNamespace(scaler=scaler),
        optimizer,
        model,
        nn.CrossEntropyLoss(),
        rule=lambda own: apo.LearningRate(own, warm_start=False),
        log=False,
    )
    assert tuner.engine.scaler is scaler
    assert tuner.rule.warm_start is False and tuner.optimizer is optimizer
