"""What is particular to a family of methods."""

from __future__ import annotations

import sys

import pytest
import torch
from tests.experiments.methods.conformance import STEPS, Cycle, build, classification, complete, regression, take_steps
from torch import nn

import apo
from apo_experiments.errors import UserError
from apo_experiments.methods import METHODS
from apo_experiments.methods.second_order import Likelihood
from apo_experiments.problem import Budget, Problem


@pytest.mark.parametrize(
    ("loss", "discrepancy"),
    [
        (nn.functional.mse_loss, apo.SquaredError("mean")),
        (lambda z, y: 0.5 * (z - y).square().sum(), apo.SquaredError("sum")),
        (nn.functional.binary_cross_entropy_with_logits, apo.BernoulliKL("mean")),
        (nn.functional.cross_entropy, apo.CategoricalKL("torch")),
    ],
)
def test_kfac_sees_the_curvature_of_the_loss(loss, discrepancy):
    likelihood = Likelihood.of(discrepancy)
    z = torch.randn(1, 6, dtype=torch.float64)
    target = torch.tensor([2]) if likelihood.kind == "categorical" else torch.rand(1, 6, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(lambda z: loss(z, target), z).reshape(6, 6)  # type: ignore[union-attr]
    p = z[0].softmax(0) if likelihood.kind == "categorical" else z[0].sigmoid()
    fisher = {
        "gaussian": torch.eye(6, dtype=torch.float64),
        "bernoulli": torch.diag(p * (1 - p)),
        "categorical": torch.diag(p) - torch.outer(p, p),
    }[likelihood.kind]
    torch.testing.assert_close(likelihood.scale(likelihood.output(z)) * fisher, hessian)


def test_kfac_finds_the_class_dimension_of_torchs_convention():
    likelihood = Likelihood.of(apo.CategoricalKL("torch"))
    assert likelihood.output(torch.zeros(4, 7, 5)).shape == (4, 5, 7)
    assert likelihood.output({"logits": torch.zeros(4, 7)}).shape == (4, 7)


def test_kfac_refuses_a_loss_that_is_no_likelihood():
    task = regression()
    odd = Problem(task.model, nn.functional.smooth_l1_loss, task.batches, task.evaluate)
    with pytest.raises(UserError, match="likelihood"):
        build("kfac", odd, {})


def test_missing_package_is_one_sentence_with_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(UserError, match="pip install"):
        build("soap", classification(), {})


def test_schedule_free_shows_the_average_at_the_end_of_an_epoch_and_only_there():
    pytest.importorskip("pytorch_optimizer")
    task = regression()
    stepper = build("schedule-free-sgd", task, {"lr": 0.3})
    modes = []
    for _ in range(8):
        take_steps(stepper, task, 1)
        modes.append(stepper.optimizer.param_groups[0]["train_mode"])  # type: ignore[attr-defined]
    assert modes == [True, True, True, False] * 2


def test_shampoo_preconditions_every_weight_matrix_however_small():
    pytest.importorskip("pytorch_optimizer")
    task = classification()
    stepper = build("shampoo", task, {"inverse_interval": 2})
    take_steps(stepper, task, 3)
    state = stepper.optimizer.state  # type: ignore[attr-defined]
    counts = [len(state[p]["pre_conditioner"].pre_conditioners) for p in task.model.parameters() if p.ndim > 1]
    assert counts == [4, 2, 2]


def test_muon_takes_matrices_and_leaves_convolutions_embeddings_and_vectors_to_adamw():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("needs a torch with Muon")
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Conv2d(1, 2, 3), "c": nn.Embedding(5, 3)})
    task = Problem(model, nn.functional.mse_loss, Cycle([(None, None)]), lambda model: {})
    stepper = build("muon", task, {"lr": 3e-2, "adamw_lr": 1e-2})
    muon, adamw = stepper.optimizer.param_groups  # type: ignore[attr-defined]
    assert [p.shape for p in muon["params"]] == [(3, 3)] and muon["lr"] == 3e-2
    assert len(adamw["params"]) == 4 and adamw["lr"] == 1e-2


def test_presets_of_the_rate_are_the_librarys_and_the_papers():
    default = build("sgdm-apo", classification(), {}).tuner.rule  # type: ignore[attr-defined]
    paper = build("sgdm-apo", classification(), {"preset": "paper"}).tuner.rule  # type: ignore[attr-defined]
    assert (default.look_ahead, default.over_relaxation, default.warm_start) == ("tail", 1.4, True)
    assert (paper.look_ahead, paper.over_relaxation, paper.warm_start) == ("step", 1.0, False)
    assert isinstance(paper.meta_optimizer, torch.optim.RMSprop) and paper.max_change is None
    group = default.meta_optimizer.param_groups[0]
    assert (group["lr"], group["betas"]) == (0.1, (0.0, 0.99))


def test_meta_optimizers_are_the_librarys_where_nothing_is_set():
    model = nn.Linear(2, 2)
    sgdm, kronecker = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), apo.Kronecker(model)
    for method, preset, own in (
        ("sgdm-apo", {}, apo.LearningRate(sgdm)),
        ("sgdm-apo", {"preset": "paper"}, apo.LearningRate.paper(sgdm)),
        ("apo-rate-momentum", {}, apo.RateAndMomentum(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))),
        ("apo-precond", {}, apo.Preconditioned(kronecker)),
        ("apo-precond", {"preset": "paper"}, apo.Preconditioned.paper(kronecker)),
        ("apo-eigen", {}, apo.Preconditioned(apo.Eigenbasis(model))),
    ):
        built = build(method, classification(), preset).tuner.rule.meta_optimizer  # type: ignore[attr-defined]
        assert type(built) is type(own.meta_optimizer) and built.defaults == own.meta_optimizer.defaults


def test_the_eigenbasis_is_the_librarys_with_the_length_of_the_run():
    stepper = build("apo-eigen", classification(), {})
    tuner, own = stepper.tuner, apo.Preconditioned(apo.Eigenbasis(nn.Linear(2, 2)))  # type: ignore[attr-defined]
    assert tuner.rule.warm_start == own.warm_start and tuner.objective.total_steps is not None
    assert [tuner.is_meta_step(step) for step in (49, 50, 51, 60)] == [True, True, False, True]
    assert tuner.optimizer.refresh_interval == own.optimizer.refresh_interval
    assert tuner.optimizer.defaults == own.optimizer.defaults


def test_explicit_values_overrule_the_preset():
    overrides = {"preset": "paper", "look_ahead": "tail", "warm_start": "true", "max_change": "0.5"}
    overrides["over_relaxation"] = "2"
    meta = {"meta_optimizer": "adam", "meta_lr": "0.03", "meta_beta2": "0.9", "per_group": "true"}
    rule = build("adam-apo", classification(), overrides | meta).tuner.rule  # type: ignore[attr-defined]
    assert (rule.look_ahead, rule.over_relaxation, rule.warm_start, rule.max_change) == ("tail", 2, True, 0.5)
    assert rule.per_group and rule.meta_optimizer.param_groups[0]["betas"] == (0.9, 0.9)
    assert rule.meta_optimizer.param_groups[0]["lr"] == 0.03


def test_no_limit_on_the_change_of_a_rate_is_written_as_zero():
    rule = build("sgd-apo", classification(), {"max_change": 0}).tuner.rule  # type: ignore[attr-defined]
    assert rule.max_change is None


def test_presets_of_the_preconditioner_are_the_librarys_and_the_papers():
    default = build("apo-precond", classification(), {}).tuner.rule  # type: ignore[attr-defined]
    paper = build("apo-precond", classification(), {"preset": "paper"}).tuner.rule  # type: ignore[attr-defined]
    assert default.meta_optimizer.param_groups[0]["lr"] == 1e-3 and default.optimizer.guarded
    assert paper.meta_optimizer.param_groups[0]["lr"] == 1e-4 and not paper.optimizer.guarded


def test_warm_up_of_the_preconditioner_is_the_papers_but_at_most_a_tenth_of_the_run():
    method = METHODS["apo-precond"]
    steps = [
        method.build(classification(), complete(method, more), Budget(length, 4)).tuner.optimizer.warmup_steps  # type: ignore[attr-defined]
        for length, more in ((1_000_000, {}), (50, {}), (50, {"warmup_steps": 7}), (50, {"warmup": "none"}))
    ]
    assert steps == [3000, 5, 7, 0]


def test_warm_up_optimizer_and_its_interval_are_used():
    stepper = build(
        "apo-precond", classification(), {"warmup": "adam", "warmup_lr": 2e-3, "warmup_interval": 1, "warmup_steps": 9}
    )
    optimizer = stepper.tuner.optimizer  # type: ignore[attr-defined]
    assert isinstance(optimizer.warmup, torch.optim.Adam) and optimizer.warmup.param_groups[0]["lr"] == 2e-3
    assert stepper.tuner.rule.interval == 1  # type: ignore[attr-defined]


def test_meta_rate_of_the_preconditioner_follows_its_own_schedule():
    task = classification()
    overrides = {"meta_schedule": "step", "milestones": (0.5,), "decay": 0.1, "warmup_interval": 1, "meta_lr": 1e-3}
    stepper = build("apo-precond", task, overrides)
    rates = []
    for _ in range(60):
        rates.append(stepper.tuner.rule.meta_optimizer.param_groups[0]["lr"])  # type: ignore[attr-defined]
        take_steps(stepper, task, 1)
    assert rates[0] == rates[29] == 1e-3 and rates[30] == rates[59] == pytest.approx(1e-4)
    assert stepper.tuner.optimizer.param_groups[0]["lr"] == 1.0  # type: ignore[attr-defined]  # the rate itself stays


def test_the_rate_of_a_preconditioner_is_what_it_does_to_the_gradient():
    task = classification()
    overrides = {"lr": 0.3, "scale": 0.5, "interval": 1, "warmup_steps": 2, "warmup_lr": 0.02, "guard": False}
    stepper = build("apo-precond", task, overrides | {"meta_lr": 0.03})
    assert stepper.rate() == 0.02  # the warm-up moves the weights
    take_steps(stepper, task, 30)
    blocks = stepper.tuner.optimizer.to_dense()  # type: ignore[attr-defined]
    mean = sum(float(block.trace()) / len(block) for block in blocks.values()) / len(blocks)
    assert mean != pytest.approx(0.3, rel=0.1)  # it has learned something
    assert stepper.rate() == pytest.approx(0.5 * mean, rel=0.1)  # which the last meta-step has changed a little
    assert stepper.telemetry()["apo/lr"] == 0.3


def test_wide_factors_learn_more_slowly_if_asked_to():
    model = nn.Sequential(nn.Linear(255, 8), nn.Linear(8, 99, bias=False), nn.BatchNorm1d(99))
    task = Problem(model, nn.functional.mse_loss, Cycle([]), lambda model: {})
    for power, expected in ((0.0, 1.0), (1.0, 0.25)):
        rule = build("apo-precond", task, {"meta_width": power, "meta_lr": 1e-3}).tuner.rule  # type: ignore[attr-defined]
        rates = {
            tuple(factor.shape): group["lr"] for group in rule.meta_optimizer.param_groups for factor in group["params"]
        }
        wide = {(256, 256): pytest.approx(1e-3 * expected), (99, 99): pytest.approx(1e-3 * (64 / 99) ** power)}
        assert rates == {**wide, (8, 8): 1e-3, (8, 256): 1e-3, (99, 8): 1e-3, (99,): 1e-3}


def test_ablations_reach_the_tuner():
    overrides = {"fsd_batch": "same", "fsd_weight": 0.7, "wsd_weight": 0.2, "interval": 3}
    tuner = build("sgd-apo", classification(), overrides).tuner  # type: ignore[attr-defined]
    assert tuner.fsd_batches.is_same and tuner.interval == 3
    assert (tuner.objective.fsd_weight, tuner.objective.wsd_weight) == (0.7, 0.2)
    tuner = build("sgd-apo", classification(), {"other_batch_share": 1.0}).tuner  # type: ignore[attr-defined]
    assert tuner.objective.other_batch_share == 1


@pytest.mark.parametrize(("given", "told"), [("auto", STEPS), ("none", None), (7, 7)])
def test_the_tuner_is_told_how_long_the_run_is(given, told):
    objective = build("sgdm-apo", classification(), {"total_steps": given}).tuner.objective  # type: ignore[attr-defined]
    assert objective.total_steps == told


@pytest.mark.parametrize("wrong", ["rising", "0", "1.5", "true"])
def test_a_length_that_is_no_number_of_steps_is_refused(wrong):
    with pytest.raises(UserError, match=r"total_steps was .*: it must be auto \(the length of the run\)"):
        build("sgdm-apo", classification(), {"total_steps": wrong})


def test_a_share_in_words_is_refused():
    with pytest.raises(UserError, match="other_batch_share was 'rising': it must be a number from 0 to 1, or none"):
        build("sgdm-apo", classification(), {"other_batch_share": "rising"})


@pytest.mark.parametrize("other", [{"fsd_batch": "same"}, {"preset": "paper"}])
def test_the_length_of_the_run_is_refused_where_it_makes_no_sense(other):
    build("sgdm-apo", classification(), {"total_steps": None, **other})
    with pytest.raises(UserError, match="--set total_steps=none as well"):
        build("sgdm-apo", classification(), {"total_steps": "auto", **other})


def test_factored_convolutions_have_smaller_factors():
    sizes = {}
    for conv in ("matrix", "factored"):
        optimizer = build("apo-precond", classification(), {"conv": conv}).tuner.optimizer  # type: ignore[attr-defined]
        sizes[conv] = sum(factor.numel() for factor in optimizer.factors())
    assert sizes["factored"] < sizes["matrix"]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("sgd-apo", {"preset": "best"}),
        ("sgd-apo", {"fsd_batch": "next"}),
        ("sgd-apo", {"meta_optimizer": "lion"}),
        ("apo-precond", {"warmup": "lbfgs"}),
        ("apo-precond", {"preset": "best"}),
        ("sgd", {"precision": "int8"}),
        ("sgd", {"schedule": "linear"}),
        ("shampoo", {"graft": "adam"}),
    ],
)
def test_word_that_is_no_choice_is_named(name, overrides):
    if name == "shampoo":
        pytest.importorskip("pytorch_optimizer")
    key, value = next(iter(overrides.items()))
    with pytest.raises(UserError, match=f"{key} was '{value}'"):
        build(name, classification(), overrides)


def test_telemetry_of_a_tuned_run_has_the_terms_of_the_objective():
    task = classification()
    stepper = build("apo-precond", task, {"interval": 2})
    assert stepper.telemetry() == {}
    take_steps(stepper, task, 3)
    assert {"apo/objective", "apo/fsd", "apo/wsd", "apo/P/mean", "apo/skipped_meta_updates"} <= set(stepper.telemetry())


@pytest.mark.parametrize("name", ["sgd", "kfac", "sgd-apo"])
def test_clipping_bounds_the_gradient_that_the_optimizer_sees(name):
    task = regression()
    stepper = build(name, task, {"clip_grad_norm": 1e-3})
    take_steps(stepper, task, 5)
    norm = torch.stack([p.grad.norm() for p in task.model.parameters()]).norm()  # type: ignore[union-attr]
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("name", ["sgdm", "kfac", "sgdm-apo", "apo-precond"])
@pytest.mark.parametrize(("precision", "expected"), [("float32", torch.float32), ("bf16-autocast", torch.bfloat16)])
def test_autocast_is_in_force_in_every_forward_pass(name, precision, expected):
    task = regression()
    seen = []
    task.model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))  # type: ignore
    take_steps(build(name, task, {"precision": precision, "lr": 0.01}), task, 12)
    assert len(seen) >= 12 and set(seen) == {expected}
