"""The Bregman divergence of a loss, its closed forms, and the choice between them."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from apo.discrepancy import (
    BernoulliKL,
    Bregman,
    CategoricalKL,
    GaussianKL,
    HuberDistance,
    PoissonKL,
    SquaredError,
    for_loss,
)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


NEW, OLD = normal(6, 4, seed=1), normal(6, 4, seed=2)
LABELS = torch.tensor([0, 1, 2, 3, 1, 0])

PAIRS = {
    "cross_entropy": (F.cross_entropy, CategoricalKL("torch"), LABELS),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.2), CategoricalKL("torch"), LABELS),
    "binary": (F.binary_cross_entropy_with_logits, BernoulliKL("mean"), (normal(6, 4, seed=3) > 0).double()),
    "poisson": (nn.PoissonNLLLoss(), PoissonKL(reduction="mean"), normal(6, 4, seed=3).exp().round()),
    "mse": (nn.MSELoss(), SquaredError("mean"), normal(6, 4, seed=3)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_bregman_divergence_of_a_loss_is_its_closed_form(name):
    loss, closed_form, target = PAIRS[name]
    new = NEW.clone().requires_grad_()
    value, expected = Bregman(loss)(new, OLD, target=target), closed_form(new, OLD)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, new), torch.autograd.grad(expected, new))


@pytest.mark.parametrize("name", PAIRS)
def test_for_loss_picks_the_closed_form(name):
    loss, closed_form, _ = PAIRS[name]
    chosen = for_loss(loss)
    assert type(chosen) is type(closed_form)
    torch.testing.assert_close(chosen(NEW, OLD), closed_form(NEW, OLD))


def test_for_loss_agrees_with_cross_entropy_on_images():
    new, old, target = normal(2, 3, 4, 4, seed=1), normal(2, 3, 4, 4, seed=2), torch.zeros(2, 4, 4).long()
    expected = Bregman(F.cross_entropy)(new, old, target=target)
    torch.testing.assert_close(for_loss(F.cross_entropy)(new, old), expected)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (F.nll_loss, CategoricalKL),
        (nn.NLLLoss(), CategoricalKL),
        (functools.partial(F.cross_entropy, label_smoothing=0.1), CategoricalKL),
        (nn.CrossEntropyLoss(weight=torch.ones(4)), CategoricalKL),
        (nn.BCEWithLogitsLoss(), BernoulliKL),
        (F.mse_loss, SquaredError),
        (nn.BCELoss(), BernoulliKL),
        (nn.L1Loss(), HuberDistance),
        (F.smooth_l1_loss, HuberDistance),
        (nn.HuberLoss(delta=0.5), HuberDistance),
        (nn.PoissonNLLLoss(), PoissonKL),
        (nn.GaussianNLLLoss(), GaussianKL),
        (nn.KLDivLoss(reduction="batchmean"), CategoricalKL),
        (nn.MultiMarginLoss(), SquaredError),
        (nn.MultiLabelSoftMarginLoss(), BernoulliKL),
    ],
)
def test_for_loss_knows_functions_modules_and_partials(loss, kind):
    assert type(for_loss(loss)) is kind


def test_for_loss_passes_the_output_on():
    assert for_loss(F.mse_loss, output="prediction").output == "prediction"


@pytest.mark.parametrize("loss", [nn.CTCLoss(), nn.TripletMarginLoss(), lambda z, t: z.sum()])
def test_for_loss_names_the_choices_for_a_loss_it_does_not_know(loss):
    with pytest.raises(ValueError, match=r"pass discrepancy=apo.Bregman\(loss\).*discrepancy=apo.SquaredError"):
        for_loss(loss)


def test_for_loss_takes_the_options_of_the_loss():
    assert repr(for_loss(nn.HuberLoss(delta=0.5))) == "HuberDistance(delta=0.5, slope=0.5, reduction='mean')"
    assert repr(for_loss(nn.SmoothL1Loss(beta=2.0))) == "HuberDistance(delta=2.0, slope=1.0, reduction='mean')"
    assert repr(for_loss(F.binary_cross_entropy)) == "BernoulliKL(reduction='mean', of='probabilities')"
    assert not for_loss(nn.PoissonNLLLoss(log_input=False)).log_input


def test_for_loss_refuses_the_mean_of_kl_div_that_divides_by_the_classes_as_well():
    with pytest.raises(ValueError, match=r'reduction="batchmean"'):
        for_loss(nn.KLDivLoss())


@pytest.mark.parametrize("loss", [nn.MSELoss(reduction="sum"), functools.partial(F.cross_entropy, reduction="sum")])
def test_for_loss_refuses_a_loss_that_is_a_sum(loss):
    with pytest.raises(ValueError, match=r"must be a mean over the examples.*fsd_weight=0\.3 times the batch size"):
        for_loss(loss)


def test_for_loss_knows_a_loss_without_reduction():
    assert type(for_loss(functools.partial(F.cross_entropy, reduction="none"))) is CategoricalKL


def test_bregman_without_targets_says_that_it_needs_them():
    with pytest.raises(ValueError, match="target must be the targets of the FSD batch for Bregman, got None: "):
        Bregman(F.mse_loss)(NEW, OLD)


def test_bregman_refuses_a_loss_of_many_numbers():
    with pytest.raises(ValueError, match=r"loss must return one number for Bregman, got shape \(6, 4\)"):
        Bregman(nn.MSELoss(reduction="none"))(NEW, OLD, target=OLD)


def test_bregman_refuses_several_outputs():
    with pytest.raises(TypeError, match="one floating-point tensor"):
        Bregman(F.mse_loss)((NEW, NEW), (OLD, OLD), target=OLD)


def test_bregman_refuses_a_loss_that_cannot_be_called():
    with pytest.raises(TypeError, match="loss must be a function"):
        Bregman("mse")  # type: ignore[arg-type]


def test_only_bregman_needs_targets():
    assert Bregman.needs_target
    assert not any(kind.needs_target for kind in (CategoricalKL, BernoulliKL, SquaredError))


def test_bregman_works_where_gradients_are_off():
    with torch.no_grad():
        value = Bregman(F.mse_loss)(NEW, OLD, target=OLD)
    torch.testing.assert_close(value, F.mse_loss(NEW, OLD))
    assert not value.requires_grad
