from __future__ import annotations

import copy
import itertools
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from tests.integrations.frameworks import assert_identical, assert_same_curves, example, history_of, plain_loop
from torch import nn

import apo

pl = pytest.importorskip("lightning.pytorch")
from apo.integrations.lightning import APOCallback, CallbackHooks, log_to  # noqa: E402

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


@pytest.fixture(scope="module")
def digits():
    return example("lightning_digits")


@pytest.fixture(autouse=True)
def _silent():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


class Small(pl.LightningModule):
    """A network with BatchNorm, trained on 12 batches, whose one-line form is chosen by `one_line`."""

    def __init__(self, one_line: bool = False) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
        self.loss = apo.criterion(F.cross_entropy)
        self.one_line = one_line
        self.tuner: apo.Tuner | None = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss(self.network(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)
        if self.one_line:
            self.tuner = apo.attach(optimizer, self.network, self.loss, interval=5, on_meta_step=log_to(self))
        return optimizer

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        data = torch.randn(96, 6, generator=generator), torch.randint(3, (96,), generator=generator)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=8)


def callback(**options):
    return APOCallback(network="network", criterion="loss", interval=5, **options)


def test_example_trains_as_the_plain_loop_does(digits):
    module = digits.Digits()
    model = copy.deepcopy(module.network)
    tuner = digits.train(module, epochs=2).tuner
    loader = digits.loader("train")
    reference = plain_loop(model, [list(loader) for _ in range(2)])
    assert tuner.steps == reference.steps == 2 * len(loader)
    assert_same_curves(tuner, reference)
    torch.testing.assert_close(module.network.state_dict(), model.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_example_learns_the_digits(digits, capsys):
    accuracy = digits.main(epochs=5)
    assert accuracy > 0.9
    assert f"test accuracy {accuracy:.1%}" in capsys.readouterr().out


def test_accumulated_batches_are_weighted_as_in_the_plain_loop(digits):
    module = digits.Digits()
    model = copy.deepcopy(module.network)
    tuner = digits.train(module, epochs=4, accumulate_grad_batches=3, limit_train_batches=30).tuner
    loader = digits.loader("train")
    reference = plain_loop(model, [list(itertools.islice(loader, 30)) for _ in range(4)], accumulate=3)
    assert tuner.steps == reference.steps == 40
    reference_rates = reference.history.column("lr/0")
    assert tuner.history.column("lr/0") == pytest.approx(reference_rates, rel=1e-5)


def test_one_line_in_configure_optimizers_equals_the_callback():
    by_callback, by_line = Small(), Small(one_line=True)
    by_line.load_state_dict(by_callback.state_dict())
    watcher = callback()
    pl.Trainer(max_epochs=2, callbacks=[watcher], logger=False, enable_checkpointing=False, **QUIET).fit(by_callback)
    pl.Trainer(max_epochs=2, logger=False, enable_checkpointing=False, **QUIET).fit(by_line)
    assert history_of(watcher.tuner) == history_of(by_line.tuner) != []
    assert_identical(by_callback, by_line)


@pytest.mark.parametrize("one_line", [False, True])
def test_resume_from_a_checkpoint_of_lightning_is_exact(tmp_path, one_line):
    def fit(module, epochs, folder, **options):
        callbacks = [] if one_line else [callback()]
        saver = pl.callbacks.ModelCheckpoint(folder, filename="last", save_on_train_epoch_end=True)
        pl.Trainer(max_epochs=epochs, callbacks=[*callbacks, saver], logger=False, **QUIET).fit(module, **options)
        return module.tuner if one_line else callbacks[0].tuner

    whole, first, second = Small(one_line), Small(one_line), Small(one_line)
    first.load_state_dict(whole.state_dict())
    undisturbed = fit(whole, 4, tmp_path / "whole")
    fit(first, 2, tmp_path / "half")
    resumed = fit(second, 4, tmp_path / "rest", ckpt_path=tmp_path / "half" / "last.ckpt", weights_only=True)
    assert_identical(whole, second)
    assert history_of(undisturbed) == history_of(resumed)
    assert resumed.steps == 48


def test_every_meta_step_reaches_the_loggers(tmp_path):
    watcher = callback()
    logger = pl.loggers.CSVLogger(tmp_path)
    pl.Trainer(max_epochs=1, callbacks=[watcher], logger=logger, enable_checkpointing=False, **QUIET).fit(Small())
    header, *rows = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    column, step = header.split(",").index("apo/lr/0"), header.split(",").index("step")
    logged = [(int(row.split(",")[step]), float(row.split(",")[column])) for row in rows]
    assert logged == [(record.step, record.lr[0]) for record in watcher.tuner.history]
    assert [step for step, _ in logged] == [0, 5, 10]


def test_rule_and_options_of_the_callback_are_used():
    watcher = callback(rule=lambda optimizer: apo.LearningRate(optimizer, warm_start=False), fsd_weight=0.7, log=False)
    module = Small()
    pl.Trainer(max_steps=3, callbacks=[watcher], logger=False, enable_checkpointing=False, **QUIET).fit(module)
    assert watcher.tuner.rule.warm_start is False
    assert watcher.tuner.objective.fsd_weight == 0.7


@pytest.mark.parametrize("limit, expected", [({"max_epochs": 2}, 12), ({"max_steps": 9}, 9)])
def test_the_callback_asks_the_trainer_for_its_end(limit, expected):
    chosen = callback(total_steps="auto")
    options = {"logger": False, "enable_checkpointing": False, "accumulate_grad_batches": 2} | QUIET
    pl.Trainer(**limit, callbacks=[chosen], **options).fit(Small())
    assert chosen.tuner.objective.total_steps == chosen.tuner.steps == expected


def test_a_trainer_without_an_end_is_refused():
    trainer = pl.Trainer(max_epochs=-1, max_steps=-1, callbacks=[callback(total_steps="auto")], logger=False, **QUIET)
    with pytest.raises(
        ValueError, match="total_steps must be a number if the trainer has no end, got 'auto': pass max_epochs or"
    ):
        trainer.fit(Small())


def test_callback_detaches_after_fitting_and_attaches_again():
    watcher, module = callback(), Small()
    hooks = len(module.network._forward_hooks)
    trainer = pl.Trainer(max_steps=3, callbacks=[watcher], logger=False, enable_checkpointing=False, **QUIET)
    trainer.fit(module)
    assert len(module.network._forward_hooks) == hooks
    first = watcher.tuner
    trainer = pl.Trainer(max_steps=3, callbacks=[watcher], logger=False, enable_checkpointing=False, **QUIET)
    trainer.fit(module)
    assert watcher.tuner is not first and watcher.tuner.steps == 3


def test_bfloat16_of_lightning_is_in_force_in_the_repeated_passes():
    watcher, seen = callback(), []
    module = Small()
    module.network[0].register_forward_hook(lambda layer, args, output: seen.append(output.dtype))
    options = {"precision": "bf16-mixed", "logger": False, "enable_checkpointing": False}
    pl.Trainer(max_steps=1, callbacks=[watcher], **options, **QUIET).fit(module)
    assert len(seen) > 3 and set(seen) == {torch.bfloat16}


def test_a_name_that_is_no_submodule_is_refused():
    watcher = APOCallback(network="network")
    trainer = pl.Trainer(max_steps=1, callbacks=[watcher], logger=False, enable_checkpointing=False, **QUIET)
    with pytest.raises(ValueError, match="criterion must name a submodule of Small, got 'criterion'"):
        trainer.fit(Small())


def test_two_optimizers_are_refused():
    class Two(Small):
        def configure_optimizers(self):
            return [torch.optim.SGD(layer.parameters()) for layer in (self.network[0], self.network[3])]

        def training_step(self, batch, batch_idx):
            raise AssertionError("not reached")

    module = Two()
    module.automatic_optimization = False
    trainer = pl.Trainer(max_steps=1, callbacks=[callback()], logger=False, enable_checkpointing=False, **QUIET)
    with pytest.raises(ValueError, match="must return one optimizer for APOCallback, got 2"):
        trainer.fit(module)


def test_weights_that_fsdp_flattens_are_refused():
    flat = type("FullyShardedDataParallel", (nn.Module,), {})()
    trainer = types.SimpleNamespace(optimizers=[None], strategy=types.SimpleNamespace(model=flat))
    with pytest.raises(ValueError, match="strategy must not be 'fsdp' for APOCallback"):
        callback().on_fit_start(trainer, Small())


def test_callback_is_one_of_lightning_and_its_class_is_made_once():
    from apo.integrations import lightning

    assert issubclass(APOCallback, pl.Callback) and issubclass(APOCallback, CallbackHooks)
    assert lightning.APOCallback is APOCallback
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = lightning.Nothing
