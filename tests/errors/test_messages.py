"""Every mistake gets one sentence that names the argument, what it was, and what to do."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.lifecycle.harness import CLASSES, DOORS, FEATURES, Run, assert_equal_bits, batch, plain_network, sgdm
from torch import Tensor, nn
from torch.optim import SGD, Adam

import apo


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(3, 4))]


def refuses(error: type[Exception], sentence: str, action: Callable[[], Any]) -> None:
    with pytest.raises(error) as caught:
        action()
    message = str(caught.value)
    assert sentence in message
    assert "\n" not in message
    assert not re.search(r"[^.]\. ", message), "one sentence"


# --- optimizers whose step is not proportional to lr ---


@pytest.mark.parametrize("name, options", [("ASGD", {}), ("Rprop", {}), ("Adafactor", {})])
def test_an_optimizer_that_is_not_linear_in_lr_is_refused(name, options):
    optimizer = getattr(torch.optim, name)(parameters(), **options)
    refuses(
        apo.NotLinearError,
        f"the step of {name} is not proportional to its lr, so apo cannot learn the rate: use SGD, Adam",
        lambda: apo.LearningRate(optimizer),
    )


def test_lbfgs_is_refused():
    optimizer = torch.optim.LBFGS(parameters())
    refuses(apo.NotLinearError, "LBFGS could not be probed", lambda: apo.LearningRate(optimizer))


def test_an_optimizer_that_maximises_is_refused():
    optimizer = SGD(parameters(), lr=0.1, maximize=True)
    refuses(apo.NotLinearError, "SGD has maximize=True", lambda: apo.LearningRate(optimizer))


@pytest.mark.parametrize("door", DOORS)
def test_the_doors_refuse_such_an_optimizer_too(door):
    refuses(apo.NotLinearError, "the step of ASGD", lambda: Run(door, lambda m: torch.optim.ASGD(m.parameters())))


# --- outputs that do not fit the divergence ---


def train_once(door: str, discrepancy: Any, network: Callable[[], nn.Module], loss: Callable[..., Tensor]) -> Run:
    run = Run(door, network=network, loss=loss, discrepancy=discrepancy)
    return run.train(range(1))


class Dictionary(nn.Linear):
    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)

    def forward(self, input: Tensor) -> Any:
        return {"scores": super().forward(input), "text": "no tensor"}


@pytest.mark.parametrize("door", DOORS)
def test_outputs_without_tensors_to_compare_are_named(door):
    refuses(
        TypeError,
        "output['text'] must be a tensor or a container of tensors, got an object of type str: name the output",
        lambda: train_once(
            door, apo.CategoricalKL(), Dictionary, lambda output, y: F.cross_entropy(output["scores"], y)
        ),
    )


@pytest.mark.parametrize("door", DOORS)
def test_a_divergence_for_classes_refuses_a_single_output(door):
    refuses(
        ValueError,
        "dim of CategoricalKL must hold at least two classes, got dimension -1 of outputs of shape (16, 1): pass",
        lambda: train_once(
            door, apo.CategoricalKL(), lambda: nn.Linear(FEATURES, 1), lambda o, y: F.mse_loss(o[:, 0], y.float())
        ),
    )


@pytest.mark.parametrize("door", DOORS)
def test_an_output_that_is_not_there_is_named(door):
    refuses(
        ValueError,
        "output must name one of the network's outputs, float32 tensor of shape (16, 3), got 'logits': pass a key",
        lambda: train_once(door, apo.CategoricalKL(output="logits"), plain_network, F.cross_entropy),
    )


@pytest.mark.parametrize("door", DOORS)
def test_a_loss_without_a_divergence_of_its_own_asks_for_one(door):
    refuses(
        ValueError,
        'discrepancy must be given for the loss cosine_similarity, got "auto": pass discrepancy=apo.Bregman(loss) if',
        lambda: Run(door, loss=F.cosine_similarity),
    )
    with pytest.raises(
        ValueError, match=r"right for a loss of any scale, or .*SquaredError.* if outputs and loss are of"
    ):
        Run(door, loss=F.cosine_similarity)
    Run(door, loss=F.cosine_similarity, fsd_weight=0)  # without the term none is needed


def test_a_network_that_should_return_its_loss_but_does_not_is_named():
    model = plain_network()
    tuner = apo.APO(sgdm(model), model)
    refuses(
        apo.ReplayError,
        "no loss function was given and the network's output, a Tensor, has no entry 'loss': pass criterion=",
        lambda: tuner.step(batch(0)[0]),
    )


class OwnLoss(nn.Linear):
    """Returns what ``answer`` makes of the outputs and the loss."""

    def __init__(self, classes: int, loss: Callable[..., Tensor], answer: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__(FEATURES, classes)
        self.loss, self.answer = loss, answer

    def forward(self, input: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        output = super().forward(input)
        return self.answer(output, self.loss(output, y))


@dataclass
class Answer:
    logits: Tensor
    loss: Tensor


def train_own_loss(model: OwnLoss, **options: Any) -> apo.APO:
    tuner = apo.APO(sgdm(model), model, **options)
    tuner.step(batch(0))
    return tuner


def test_a_regression_that_returns_its_loss_is_told_its_divergence():
    mse = lambda output, y: F.mse_loss(output[:, 0], y.float())  # noqa: E731
    regression = lambda: OwnLoss(1, mse, lambda output, loss: (output, loss))  # noqa: E731
    refuses(
        ValueError,
        'pass discrepancy=apo.SquaredError("mean") for a regression, apo.BernoulliKL("mean") for binary logits',
        lambda: train_own_loss(regression()),
    )
    assert train_own_loss(regression(), discrepancy=apo.SquaredError("mean")).history  # what it says works


def test_the_logits_of_an_object_with_loss_and_logits_are_found():
    divergences = []
    for options in ({}, {"discrepancy": apo.CategoricalKL(output="logits")}):
        torch.manual_seed(0)
        divergences.append(train_own_loss(OwnLoss(CLASSES, F.cross_entropy, Answer), **options).history.column("fsd"))
    assert divergences[0] == divergences[1] != []


@pytest.mark.parametrize("answer", [lambda o, loss: loss, lambda o, loss: (loss,), lambda o, loss: {"loss": loss}])
def test_a_network_that_returns_its_loss_alone_is_told_that_outputs_are_missing(answer):
    with pytest.raises((apo.ReplayError, TypeError, ValueError), match=r"outputs, which apo|beside (a|its) loss"):
        train_own_loss(OwnLoss(CLASSES, F.cross_entropy, answer))


# --- batches ---


@pytest.mark.parametrize("door", DOORS)
def test_an_exhausted_generator_of_fsd_batches_is_named_and_the_weights_stay(door):
    run = Run(door, fsd_batch=(batch(500 + index) for index in range(2)), interval=1)
    run.train(range(2))
    before = run.weights()
    refuses(
        apo.MissingBatchError,
        "fsd_batch yielded no batch for the function-space term: pass an iterable that can be started again",
        lambda: run.train(range(2, 3)),
    )
    assert_equal_bits(before, run.weights())


@pytest.mark.parametrize("door", DOORS)
def test_an_empty_source_of_fsd_batches_is_named(door):
    refuses(apo.MissingBatchError, "fsd_batch yielded no batch", lambda: Run(door, fsd_batch=[]).train(range(1)))


def test_a_step_without_a_recorded_batch_says_what_to_call():
    run = Run("explicit")
    for p in run.model.parameters():
        p.grad = torch.ones_like(p)
    refuses(apo.ReplayError, "call tuner.backward(...) before tuner.step()", run.tuner.step)


def test_a_loop_that_passes_by_the_network_says_what_to_call():
    run = Run("attached")
    inputs, target = run.batch(0)
    run.criterion(run.model.forward(inputs), target).backward()
    before = run.weights()
    refuses(apo.ReplayError, "call model(...) and criterion(...) themselves, not model.forward", run.optimizer.step)
    assert_equal_bits(before, run.weights())


@pytest.mark.parametrize("door", DOORS)
def test_the_ablation_needs_targets(door):
    run = Run(door, other_batch_share=1.0, fsd_batch=[batch(0)[0]])
    refuses(
        apo.MissingBatchError,
        "that batch has no targets: let fsd_batch yield (inputs, target) pairs",
        lambda: run.train(range(1)),
    )


# --- numbers ---


@pytest.mark.parametrize("rule", ["sgdm", "adam", "kronecker", "rate and momentum"])
@pytest.mark.parametrize("door", DOORS)
def test_a_loss_that_is_nan_stops_training_with_the_last_good_weights(door, rule):
    run = Run(door, rule, interval=1).train(range(2))
    before = run.weights()
    inputs, target = run.batch(2)
    inputs[0, 0] = float("nan")
    refuses(
        apo.NonFiniteError,
        "the training loss is nan at step 2, so there is nothing to learn from: look for NaN in the data",
        lambda: run.step(inputs, target),
    )
    assert_equal_bits(before, run.weights())


@pytest.mark.parametrize("door", DOORS)
def test_weights_that_would_not_be_finite_are_not_committed(door):
    run = Run(door, "paper", interval=1).train(range(2))
    before = run.weights()
    run.backward(*run.batch(2))
    run.model[0].weight.grad[0, 0] = float("inf")
    refuses(apo.NonFiniteError, "step 2 would make the weights infinite or NaN at learning rate", run.update)
    assert_equal_bits(before, run.weights())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["fsd_weight", "wsd_weight"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_weights_of_the_objective_must_be_finite_and_not_negative(door, name, value):
    refuses(
        ValueError,
        f"{name} must be finite and not negative, got {value}: use 0 to leave the term out",
        lambda: Run(door, **{name: value}),
    )


@pytest.mark.parametrize("name", ["fsd_weight", "wsd_weight"])
def test_weights_of_the_objective_must_be_numbers(name):
    refuses(TypeError, f"{name} must be a number, got '0.3'", lambda: Run("explicit", **{name: "0.3"}))


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
@pytest.mark.parametrize("door", DOORS)
def test_a_rate_of_zero_cannot_be_learned(door, rate):
    refuses(
        ValueError,
        "lr of param group 0 must be positive, got 0.0: leave parameters that should not move out",
        lambda: Run(door, lambda model: SGD(model.parameters(), lr=rate, foreach=False)),
    )


def test_rate_and_momentum_say_what_they_need():
    model = plain_network()
    refuses(ValueError, "lr of optimizer must be positive, got 0.0", lambda: apo.RateAndMomentum(sgdm(model, lr=0.0)))
    refuses(
        ValueError,
        "optimizer must have 0 < momentum < 1, nesterov=False and dampening=0, got momentum=0, nesterov=False",
        lambda: apo.RateAndMomentum(SGD(model.parameters(), lr=0.1)),
    )
    refuses(
        TypeError,
        "optimizer must be torch.optim.SGD, got Adam",
        lambda: apo.RateAndMomentum(Adam(model.parameters())),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"look_ahead": "far"}, "look_ahead must be 'tail' or 'step', got 'far'"),
        ({"over_relaxation": 0.0}, "over_relaxation must be positive or 'auto', got 0.0: use 1 to turn it off"),
        ({"max_change": -1.0}, "max_change must be positive or None, got -1.0"),
        ({"bounds": (1.0, 0.1)}, "bounds must be 0 < lowest < highest, got (1.0, 0.1)"),
        ({"bounds": (0.0, 0.1)}, "bounds must be 0 < lowest < highest, got (0.0, 0.1)"),
    ],
)
def test_options_of_the_learning_rate_rule_that_make_no_sense(options, sentence):
    refuses(ValueError, sentence, lambda: apo.LearningRate(SGD(parameters(), lr=0.1), **options))


@pytest.mark.parametrize(
    "options, sentence",
    [
        (
            {"patience": 0},
            "patience must be a whole number of at least 1, got 0: use guard=False to hand over",
        ),
        ({"warmup_interval": 0}, "warmup_interval must be a whole number of at least 1, got 0"),
        ({"warm_start": -1.0}, "warm_start must be positive, None or 'auto', got -1.0"),
    ],
)
def test_options_of_the_preconditioning_rule_that_make_no_sense(options, sentence):
    refuses(ValueError, sentence, lambda: apo.Preconditioned(apo.Kronecker(plain_network()), **options))


# --- types ---


@pytest.mark.parametrize("interval", [0, -3, 2.5, True, "10"])
@pytest.mark.parametrize("door", DOORS)
def test_the_interval_is_a_whole_number(door, interval):
    refuses(
        ValueError,
        f"interval must be a whole number of at least 1, got {interval!r}",
        lambda: Run(door, interval=interval),
    )


def test_the_model_is_a_module():
    optimizer = SGD(parameters(), lr=0.1)
    model: Any = F.relu
    expected = "model must be a torch.nn.Module, got function"
    refuses(TypeError, expected, lambda: apo.APO(optimizer, model, F.cross_entropy))
    refuses(TypeError, expected, lambda: apo.attach(optimizer, model, nn.CrossEntropyLoss()))


def test_the_rule_is_a_rule_or_an_optimizer():
    model: Any = plain_network()
    expected = "optimizer must be a torch.optim.Optimizer or an apo rule, got Sequential"
    refuses(TypeError, expected, lambda: apo.APO(model, model, F.cross_entropy))
    refuses(TypeError, expected, lambda: apo.attach(model, model, nn.CrossEntropyLoss()))
    alone: Any = model.parameters()
    expected = "or an apo rule, got generator: pass the one that the training loop steps, such as torch.optim.AdamW("
    refuses(TypeError, expected, lambda: apo.attach(alone, model, nn.CrossEntropyLoss()))
    refuses(
        TypeError,
        "optimizer must be a torch.optim.Optimizer, got Sequential",
        lambda: apo.LearningRate(model),
    )
    refuses(
        TypeError,
        "optimizer must be an apo preconditioner, got SGD",
        lambda: apo.Preconditioned(sgdm(model)),  # type: ignore[arg-type]
    )


def test_arguments_of_attach_in_the_wrong_order_are_noticed():
    model: Any = plain_network()
    optimizer: Any = sgdm(model)
    expected = "in the order apo.attach(optimizer, model, criterion), got Sequential, SGD: swap them"
    refuses(TypeError, expected, lambda: apo.attach(model, optimizer))  # type: ignore[arg-type]


def test_a_functional_loss_has_to_be_wrapped_for_attach():
    model, loss = plain_network(), F.cross_entropy
    refuses(
        TypeError,
        "wrap it, criterion = apo.criterion(your_function), and call the wrapped one in the loop",
        lambda: apo.attach(sgdm(model), model, loss),  # type: ignore[arg-type]
    )
    refuses(TypeError, "function must be callable, got int", lambda: apo.criterion(3))  # type: ignore[arg-type]


def test_the_names_of_the_last_release_work_with_a_warning():
    model = plain_network()
    with pytest.warns(apo.ApoWarning, match=r"takes the optimizer first.*write APO\(optimizer, model, criterion\)"):
        tuner: Any = apo.APO(model, sgdm(model), F.cross_entropy)  # type: ignore[arg-type]
    assert tuner.model is model and tuner.step(*batch(0)) is not None
    model = plain_network()
    with pytest.warns(apo.ApoWarning, match="loss= is called criterion= now"):
        tuner = apo.APO(sgdm(model), model, loss=F.cross_entropy)
    assert tuner.step(*batch(0)) is not None
    expected = "criterion and loss are two names of one argument"
    refuses(TypeError, expected, lambda: apo.APO(sgdm(model), model, F.cross_entropy, loss=F.cross_entropy))


def test_a_misspelt_option_is_an_error_with_its_name():
    model = plain_network()
    misspelt: Any = {"totl_steps": 100}
    expected = "unexpected keyword argument 'totl_steps'"
    refuses(TypeError, expected, lambda: apo.APO(sgdm(model), model, F.cross_entropy, **misspelt))
    refuses(TypeError, expected, lambda: apo.attach(sgdm(model), model, nn.CrossEntropyLoss(), **misspelt))


def test_both_front_doors_have_the_same_typed_signature():
    explicit, attached = inspect.signature(apo.APO), inspect.signature(apo.attach)
    assert list(explicit.parameters.values()) == list(attached.parameters.values())
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in attached.parameters.values())
    assert all(parameter.annotation is not parameter.empty for parameter in attached.parameters.values())


def test_the_loss_is_callable():
    model = plain_network()
    loss: Any = "cross_entropy"
    refuses(
        TypeError,
        "criterion must be callable as criterion(output, target) or None, got str",
        lambda: apo.APO(sgdm(model), model, loss),
    )


def test_a_criterion_returns_its_loss_alone():
    run = Run("attached", loss=lambda output, target: (F.cross_entropy(output, target), 0), fsd_weight=0)  # type: ignore
    inputs, target = run.batch(0)
    refuses(
        TypeError,
        "criterion must return a tensor, got tuple: let it return the loss alone",
        lambda: run.criterion(run.model(inputs), target),
    )


@pytest.mark.parametrize("choice", ["next", 3, None, torch.zeros(3)])
@pytest.mark.parametrize("door", DOORS)
def test_the_fsd_batch_is_a_known_word_or_an_iterable(door, choice):
    refuses(
        TypeError,
        "fsd_batch must be 'previous', 'same' or an iterable of batches, got",
        lambda: Run(door, fsd_batch=choice),
    )


@pytest.mark.parametrize("choice", ["kl", F.kl_div, None])
@pytest.mark.parametrize("door", DOORS)
def test_the_discrepancy_is_one_of_apos(door, choice):
    refuses(
        TypeError,
        "discrepancy must be 'auto' or an apo.discrepancy.Discrepancy, got",
        lambda: Run(door, discrepancy=choice),
    )


@pytest.mark.parametrize("door", DOORS)
def test_an_unknown_option_is_named(door):
    refuses(TypeError, "unexpected keyword argument 'fsd_wait'", lambda: Run(door, fsd_wait=0.3))


# --- checkpoints ---


def test_a_checkpoint_of_another_rule_is_refused():
    single, both = Run("explicit"), Run("explicit", "per group")
    state = both.tuner.state_dict()
    state["optimizer"] = single.tuner.state_dict()["optimizer"]
    refuses(
        ValueError,
        "the saved state has 2 meta-parameters that do not fit the 1 of LearningRate: build the rule with the same",
        lambda: single.tuner.load_state_dict(state),
    )


def test_an_iterator_of_fsd_batches_cannot_be_copied():
    run = Run("explicit", fsd_batch=iter([batch(0)]))
    refuses(TypeError, "fsd_batch is an iterator and cannot be copied", lambda: copy.deepcopy(run.tuner))


# --- found by users ---


def test_small_mistakes_get_a_sentence_each():
    model = plain_network()
    cases = [
        (TypeError, "scaler must be a torch.amp.GradScaler or None, got True", {"scaler": True}),
        (TypeError, "mask must be 'auto', None or a function of a batch's recording, got 'x'", {"mask": "x"}),
        (ValueError, "interval must be a whole number of at least 1, got 2.5", {"interval": 2.5}),
        (
            TypeError,
            "got the class itself, CrossEntropyLoss: write CrossEntropyLoss()",
            {"criterion": nn.CrossEntropyLoss},
        ),
    ]
    for error, sentence, options in cases:
        refuses(
            error,
            sentence,
            lambda options=options: apo.APO(sgdm(model), model, **({"criterion": F.mse_loss} | options)),
        )
    assert apo.APO(sgdm(model), model, F.cross_entropy, on_meta_step=None).history[-3:] == []


@pytest.mark.parametrize("loss, got", [(lambda o, t: (o.sum(), t), "tuple"), (lambda o, t: o.sum(0), "shape (3,)")])
def test_a_loss_that_is_not_one_number_is_refused(loss, got):
    model = plain_network()
    tuner = apo.APO(sgdm(model), model, loss, discrepancy=apo.discrepancy.CategoricalKL())
    refuses(TypeError, got, lambda: tuner.step(*batch(0)))


def test_a_tuner_is_not_pickled():
    model = plain_network()
    tuner = apo.APO(sgdm(model), model, F.cross_entropy)
    refuses(TypeError, "a tuner cannot be pickled", lambda: pickle.dumps(tuner))


@pytest.mark.parametrize("rule", [sgdm, lambda model: apo.Kronecker(model, lr=0.1)])
def test_a_sparse_gradient_is_refused(rule):
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    tuner = apo.APO(rule(model), model, lambda output, target: output.square().mean(), fsd_weight=0.0)
    refuses(TypeError, "sparse=False", lambda: tuner.step(torch.tensor([0, 2])))
