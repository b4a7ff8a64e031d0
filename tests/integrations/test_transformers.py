from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.integrations.frameworks import assert_identical, assert_same_curves, example, history_of

import apo

transformers = pytest.importorskip("transformers")
from apo.integrations import transformers as apo_transformers  # noqa: E402

if not transformers.is_torch_available():
    pytest.skip("this release of transformers needs a newer torch", allow_module_level=True)
pytestmark = pytest.mark.integrations


@pytest.fixture(scope="module", autouse=True)
def _offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def text():
    return example("huggingface_text")


def constant(optimizer):
    """Without the comparison of batches: curvature from differences of float32 losses would show every rounding."""
    return apo.LearningRate(optimizer, over_relaxation=1.4)


def with_constant(trainer, tuner, **options):
    """Exchange the rule of a trainer that has not started."""
    tuner.detach()
    return apo_transformers.attach(trainer, rule=constant, **options)


def plain_loop(model, micro_batches, schedule):
    """Trains as the Trainer does by default: AdamW, clipping at norm 1, a schedule that multiplies."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, weight_decay=0.0)
    tuner = apo.attach(constant(optimizer), model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    model.train()
    for group in micro_batches:
        words = sum(int((batch["labels"] != -100).sum()) for batch in group)
        for batch in group:
            model(**batch, num_items_in_batch=words).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return tuner


@pytest.fixture
def seen(text, monkeypatch):
    """Returns the list into which every batch of the example goes."""
    batches, collate = [], text.collate
    monkeypatch.setattr(text, "collate", lambda examples: batches.append(collate(examples)) or batches[-1])
    return batches


@pytest.mark.parametrize("accumulate", [1, 2])
def test_example_trains_as_the_plain_loop_does(text, seen, tmp_path, accumulate):
    model = text.network()
    twin = copy.deepcopy(model)
    options = {"max_steps": 60, "gradient_accumulation_steps": accumulate, "per_device_train_batch_size": 16}
    trainer, tuner = text.trainer_of(model, str(tmp_path), **options)
    tuner = with_constant(trainer, tuner)
    trainer.train()
    length = len(trainer.get_train_dataloader())  # an epoch ends with a step, if of fewer micro-batches
    epochs = [seen[start : start + length] for start in range(0, len(seen), length)]
    groups = [epoch[start : start + accumulate] for epoch in epochs for start in range(0, length, accumulate)]
    reference = plain_loop(twin, groups[:60], lambda step: 1 - step / 60)
    assert tuner.steps == reference.steps == 60
    assert_same_curves(tuner, reference)
    # Not the weights themselves: attention has no gradient for the bias of its keys, Adam moves it by rounding alone.
    batch = text.collate(text.sentences("test"))
    assert model.eval()(**batch).loss.item() == pytest.approx(twin.eval()(**batch).loss.item(), rel=1e-5)


@pytest.mark.slow
def test_example_learns_to_count(text, capsys):
    accuracy = text.main(epochs=20)
    assert accuracy > 0.6
    assert f"test accuracy {accuracy:.1%}" in capsys.readouterr().out


def test_resume_from_a_checkpoint_of_the_trainer_is_exact(text, tmp_path):
    def train(model, folder, **options):
        trainer, tuner = text.trainer_of(model, str(tmp_path / folder), max_steps=30, save_strategy="steps", **options)
        return trainer, tuner

    whole = text.network(dropout=0.1)
    other = text.network(dropout=0.1)  # other weights: those of the checkpoint count
    trainer, undisturbed = train(whole, "whole", save_steps=14)
    trainer.train()
    trainer, resumed = train(other, "rest", save_steps=100)
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-14"))
    assert_identical(whole, other)
    assert history_of(undisturbed) == history_of(resumed)
    assert resumed.steps == 30


def test_own_optimizer_attached_before_the_trainer_learns_alike(text, tmp_path):
    by_trainer = text.network()
    by_hand = copy.deepcopy(by_trainer)
    trainer, tuner = text.trainer_of(by_trainer, str(tmp_path), max_steps=25, optim="sgd", warmup_steps=5)
    trainer.train()
    groups = trainer.get_decay_parameter_names(by_hand)
    named = dict(by_hand.named_parameters())
    split = [[named[n] for n in named if n in groups], [named[n] for n in named if n not in groups]]
    optimizer = torch.optim.SGD([{"params": part} for part in split], lr=1e-7)
    own = apo.attach(optimizer, by_hand)
    arguments = copy.copy(trainer.args)
    options = {"train_dataset": trainer.train_dataset, "data_collator": text.collate}
    transformers.Trainer(by_hand, arguments, optimizers=(optimizer, None), **options).train()
    assert history_of(tuner) == history_of(own)
    assert_identical(by_trainer, by_hand)


def test_schedule_of_the_trainer_multiplies_the_learned_rate(text, tmp_path):
    trainer, tuner = text.trainer_of(text.network(), str(tmp_path), max_steps=12)
    shown = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            shown.append(optimizer.param_groups[0]["lr"] / tuner.rule.learned_rates()[0])

    trainer.add_callback(Watch())
    trainer.train()
    assert shown == pytest.approx([1 - step / 12 for step in range(1, 13)], abs=1e-9)
    assert tuner.rule.learned_rates()[0] > 1e-4  # not the rate it began with, 1e-7


def test_figures_of_every_meta_step_are_in_the_log_of_the_trainer(text, tmp_path):
    trainer, tuner = text.trainer_of(text.network(), str(tmp_path), max_steps=21)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "apo/lr/0" in entry]
    assert [entry["step"] for entry in logged] == list(range(21))
    assert [entry["apo/fsd"] for entry in logged] == tuner.history.column("fsd")


@pytest.mark.parametrize(
    ("limit", "accumulate"),
    [
        ({"max_steps": 7}, 3),
        ({"num_train_epochs": 2}, 3),
        ({"num_train_epochs": 1.5}, 1),
        ({"num_train_epochs": 1.5}, 3),
    ],
)
def test_the_trainer_is_asked_for_its_end(text, tmp_path, limit, accumulate):
    options = {"gradient_accumulation_steps": accumulate, "per_device_train_batch_size": 64, **limit}
    trainer, without = text.trainer_of(text.network(), str(tmp_path), **options)
    without.detach()
    tuner = apo_transformers.attach(trainer, total_steps="auto")
    trainer.train()
    assert tuner.objective.total_steps == tuner.steps == trainer.state.max_steps


def test_asking_the_trainer_for_its_end_draws_no_random_numbers(text, tmp_path, monkeypatch):
    trainer, without = text.trainer_of(text.network(), str(tmp_path), num_train_epochs=2)
    without.detach()
    loader = trainer.get_train_dataloader()
    monkeypatch.setattr(trainer, "get_train_dataloader", lambda: [torch.rand(1), loader][1])  # shuffles, say
    before = torch.get_rng_state()
    tuner = apo_transformers.attach(trainer, total_steps="auto")
    assert tuner.objective.total_steps == 2 * len(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_padding_of_the_labels_counts_in_no_term(text, tmp_path):
    def more_padding(examples):
        batch = collate(examples)
        padded = {name: F.pad(value, (0, 1)) for name, value in batch.items()}
        padded["labels"][:, -1] = -100
        return padded

    collate, model = text.collate, text.network()
    twin, third = copy.deepcopy(model), copy.deepcopy(model)
    trainer, tuner = text.trainer_of(model, str(tmp_path), max_steps=21)
    tuner = with_constant(trainer, tuner)
    trainer.train()
    trainer, padded = text.trainer_of(twin, str(tmp_path), max_steps=21)
    padded = with_constant(trainer, padded)
    trainer.data_collator = more_padding
    trainer.train()
    assert padded.history.column("fsd") == pytest.approx(tuner.history.column("fsd"), rel=1e-4)
    assert padded.history.column("lr/0") == pytest.approx(tuner.history.column("lr/0"), rel=1e-4)
    trainer, unmasked = text.trainer_of(third, str(tmp_path), max_steps=21)
    trainer.data_collator = more_padding
    unmasked = with_constant(trainer, unmasked, mask=None)
    trainer.train()
    assert unmasked.history.column("fsd") != pytest.approx(tuner.history.column("fsd"), rel=1e-2)


def test_loss_function_of_the_trainer_is_watched(text, tmp_path):
    def own_loss(outputs, labels, num_items_in_batch=None):
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    model = text.network()
    twin = copy.deepcopy(model)
    trainer, tuner = text.trainer_of(model, str(tmp_path), max_steps=21)
    trainer.train()
    arguments, data = trainer.args, trainer.train_dataset
    trainer = transformers.Trainer(
        twin, arguments, train_dataset=data, data_collator=text.collate, compute_loss_func=own_loss
    )
    watching = apo_transformers.attach(trainer, discrepancy=apo.CategoricalKL())
    trainer.train()
    assert watching.history.column("loss") == pytest.approx(tuner.history.column("loss"), rel=1e-4)


def test_network_that_the_trainer_makes_anew_is_refused(text, tmp_path):
    trainer, tuner = text.trainer_of(text.network(), str(tmp_path))
    tuner.detach()
    trainer.model_init = text.network
    with pytest.raises(ValueError, match="trainer must be given a model, got model_init"):
        apo_transformers.attach(trainer)


def test_label_smoothing_of_the_trainer_is_refused(text, tmp_path):
    trainer, _ = text.trainer_of(text.network(), str(tmp_path), label_smoothing_factor=0.1)
    with pytest.raises(apo.ReplayError, match="has no entry 'loss'"):
        trainer.train()


def test_copies_on_several_gpus_are_refused(text, tmp_path, monkeypatch):
    trainer, tuner = text.trainer_of(text.network(), str(tmp_path))
    tuner.detach()
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match="trainer must run without FSDP and with one GPU per process, got 2 GPUs"):
        apo_transformers.attach(trainer)
