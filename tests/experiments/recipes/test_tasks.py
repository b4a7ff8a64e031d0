"""The tasks are the paper's: what is minimised, what is measured, and what a seed decides."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from apo_experiments.errors import UserError
from apo_experiments.recipe import Setting
from apo_experiments.tasks import autoencoder, ill_conditioned, images, translation, uci
from apo_experiments.tasks.evaluation import judged

CPU = torch.device("cpu")


def setting(seed=0):
    return Setting(seed, CPU, None)


def test_the_matrix_has_its_condition_number():
    matrix = ill_conditioned._matrix(10, 6, 1e6, seed=0)
    singular = torch.linalg.svdvals(matrix)
    assert singular.max().item() == pytest.approx(1)
    assert (singular.max() / singular.min()).item() == pytest.approx(1e6, rel=1e-6)


def test_the_loss_on_many_inputs_is_the_closed_form_of_the_objective():
    problem = ill_conditioned.ill_conditioned(ill_conditioned.DEFAULTS | {"batch_size": 20_000}, setting())
    inputs, target = problem.batches.next()
    exact = problem.evaluate(problem.model)["objective"]
    assert problem.loss(problem.model(inputs), target).item() == pytest.approx(exact, rel=0.03)


def test_the_autoencoders_loss_is_a_likelihood_plus_the_penalty():
    options = autoencoder.DEFAULTS | {
        "data": "generated",
        "width": 0.02,
        "l2": 0.1,
        "train_images": 64,
        "batch_size": 64,
    }
    problem = autoencoder.autoencoder(options, setting())
    inputs, target = problem.batches.next()
    logits = problem.model(inputs)
    entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(1).mean()
    penalty = sum(p.square().sum() for p in problem.model.parameters())
    assert problem.loss(logits, target).item() == pytest.approx((entropy + 0.05 * penalty).item(), rel=1e-6)
    # All images are in this one batch, so the metric must agree with it.
    assert problem.evaluate(problem.model)["objective"] == pytest.approx(problem.loss(logits, target).item(), rel=1e-5)


def test_chunks_of_unequal_size_count_by_their_examples():
    inputs, targets = torch.randn(11, 3), torch.randn(11, 3)
    evaluate = judged({"": (inputs, targets)}, {"error": F.mse_loss}, chunk=4)
    assert evaluate(nn.Identity()) == {"error": pytest.approx(F.mse_loss(inputs, targets).item(), rel=1e-6)}


def small_images(**changes):
    return images.DEFAULTS | {"data": "generated", "model": "lenet", "train_images": 40, "test_images": 20} | changes


def test_held_out_images_are_not_trained_on_and_the_test_images_stay():
    whole = images.images(small_images(batch_size=36), setting())
    held = images.images(small_images(batch_size=36, validation=True), setting())
    assert held.batches.steps_per_epoch == 1  # 36 of 40 images are left
    assert set(held.evaluate(held.model)) - set(whole.evaluate(whole.model)) == {"valid_accuracy", "valid_loss"}
    # Same seed, same weights: what is measured on the test images does not depend on the split.
    whole.model.load_state_dict(held.model.state_dict())
    assert whole.evaluate(whole.model)["test_loss"] == held.evaluate(held.model)["test_loss"]


@pytest.mark.parametrize("name", sorted(images.MODELS))
def test_every_network_takes_the_images_of_its_data_set(name):
    problem = images.images(small_images(model=name, width=0.06, batch_size=4), setting())
    inputs, labels = problem.batches.next()
    assert problem.model(inputs).shape == (4, 10) and labels.shape == (4,)


@pytest.mark.parametrize("precision, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_sixteen_bits_are_those_of_weights_gradients_and_activations(precision, dtype):
    problem = images.images(small_images(precision=precision, batch_size=8), setting())
    seen = []
    problem.model.model.features[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    inputs, labels = problem.batches.next()
    problem.loss(problem.model(inputs), labels).backward()
    assert seen == [dtype] and inputs.dtype == dtype
    assert (
        {p.dtype for p in problem.model.parameters()} == {dtype} == {p.grad.dtype for p in problem.model.parameters()}
    )


def test_evaluation_leaves_modes_and_statistics_alone():
    problem = images.images(small_images(model="resnet18", width=0.06, batch_size=8), setting())
    problem.model.train()
    before = {name: value.clone() for name, value in problem.model.state_dict().items()}
    problem.evaluate(problem.model)
    assert all(module.training for module in problem.model.modules())
    assert all(torch.equal(value, before[name]) for name, value in problem.model.state_dict().items())


def test_padding_does_not_count_in_the_translation_loss():
    pytest.importorskip("sentencepiece")
    pytest.importorskip("sacrebleu")
    sizes = {"layers": 1, "dimension": 8, "feed_forward": 8, "heads": 1, "vocabulary": 60, "dropout": 0.0}
    options = translation.DEFAULTS | sizes | {"data": "generated", "train_pairs": 40, "label_smoothing": 0.0}
    problem = translation.translation(options, setting())
    inputs, target = problem.batches.next()
    logits = problem.model(*inputs)
    real = target != 0
    assert problem.loss(logits, target).item() == pytest.approx(F.cross_entropy(logits[real], target[real]).item())


@pytest.mark.parametrize(
    "build, options",
    [
        (uci.uci, uci.DEFAULTS),
        (images.images, images.DEFAULTS),
        (autoencoder.autoencoder, autoencoder.DEFAULTS),
    ],
)
def test_an_unknown_source_of_data_is_refused(build, options):
    with pytest.raises(UserError, match="data was 'elsewhere': it must be official or generated"):
        build(options | {"data": "elsewhere"}, setting())
