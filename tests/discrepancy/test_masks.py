"""A mask gives what computing on the kept positions alone would give."""

import pytest
import torch
from torch.nn import functional as F

from apo.discrepancy import BernoulliKL, Bregman, CategoricalKL, GaussianKL, HuberDistance, PoissonKL, SquaredError


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


NEW, OLD, TARGET = normal(4, 5, 3, seed=1), normal(4, 5, 3, seed=2), normal(4, 5, 3, seed=3)
EXAMPLES = torch.tensor([True, False, True, True])
TOKENS = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()

DISCREPANCIES = {
    "categorical": CategoricalKL(),
    "bernoulli-sum": BernoulliKL(),
    "bernoulli-mean": BernoulliKL("mean"),
    "gaussian": GaussianKL(variance=0.5),
    "squared-sum": SquaredError(),
    "squared-mean": SquaredError("mean"),
    "poisson": PoissonKL(),
    "huber-mean": HuberDistance(reduction="mean"),
    "bregman": Bregman(F.mse_loss),
}


@pytest.mark.parametrize("name", DISCREPANCIES)
def test_masking_examples_equals_dropping_them(name):
    rho = DISCREPANCIES[name]
    expected = rho(NEW[EXAMPLES], OLD[EXAMPLES], target=TARGET[EXAMPLES])
    torch.testing.assert_close(rho(NEW, OLD, EXAMPLES, target=TARGET), expected)


@pytest.mark.parametrize("name", ["categorical", "bernoulli-mean", "squared-mean", "bregman"])
def test_masking_tokens_equals_dropping_them_from_a_mean(name):
    rho = DISCREPANCIES[name]
    expected = rho(NEW[TOKENS], OLD[TOKENS], target=TARGET[TOKENS])
    torch.testing.assert_close(rho(NEW, OLD, TOKENS, target=TARGET), expected)


def test_masking_tokens_of_a_sum_averages_over_the_examples_that_keep_any():
    expected = ((NEW - OLD) ** 2)[TOKENS].sum() / 2 / 3
    torch.testing.assert_close(SquaredError()(NEW, OLD, TOKENS), expected)


def test_mask_of_class_first_logits_speaks_about_the_other_dimensions():
    expected = CategoricalKL()(NEW, OLD, TOKENS)
    torch.testing.assert_close(CategoricalKL("torch")(NEW.mT, OLD.mT, TOKENS), expected)


def test_mask_applies_to_mean_and_log_variance():
    new, old = (NEW, TARGET), (OLD, TARGET / 2)
    expected = GaussianKL()(tuple(t[EXAMPLES] for t in new), tuple(t[EXAMPLES] for t in old))
    torch.testing.assert_close(GaussianKL()(new, old, EXAMPLES), expected)


@pytest.mark.parametrize("mask", [torch.zeros(4).bool(), torch.zeros(4, 5).bool()], ids=["examples", "tokens"])
@pytest.mark.parametrize("name", DISCREPANCIES)
def test_an_all_false_mask_gives_zero_with_zero_gradient(name, mask):
    new = NEW.clone().requires_grad_()
    value = DISCREPANCIES[name](new, OLD, mask, target=TARGET)
    assert value.item() == 0
    (gradient,) = torch.autograd.grad(value, new)
    assert (gradient == 0).all()


@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", DISCREPANCIES)
def test_junk_at_excluded_positions_harms_neither_value_nor_gradient(name, junk):
    rho = DISCREPANCIES[name]
    expected = rho(NEW, OLD, EXAMPLES, target=TARGET)
    spoiled = NEW.clone()
    spoiled[~EXAMPLES] = junk
    spoiled.requires_grad_()
    value = rho(spoiled, OLD, EXAMPLES, target=TARGET)
    torch.testing.assert_close(value, expected)
    (gradient,) = torch.autograd.grad(value, spoiled)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", DISCREPANCIES)
def test_a_mask_of_another_shape_is_refused(name):
    with pytest.raises(ValueError, match=r"mask must have the leading dimensions of .* got shape \(5,\)"):
        DISCREPANCIES[name](NEW, OLD, torch.ones(5).bool(), target=TARGET)


@pytest.mark.parametrize("mask", [torch.ones(4), torch.ones(4).long(), [True]])
def test_a_mask_that_is_not_bool_is_refused(mask):
    with pytest.raises(TypeError, match=r"mask must be a bool tensor.*mask\.bool\(\)"):
        SquaredError()(NEW, OLD, mask)


def test_an_empty_batch_gives_zero():
    assert SquaredError()(NEW[:0], OLD[:0]).item() == 0
    assert CategoricalKL()(NEW[:0], OLD[:0]).item() == 0
