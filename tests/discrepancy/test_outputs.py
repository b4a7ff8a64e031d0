"""Outputs of any structure: what is compared, in which precision, and what is refused."""

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch

from apo.discrepancy import BernoulliKL, CategoricalKL, GaussianKL, SquaredError


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


NEW, OLD, OTHER = normal(4, 3, seed=1), normal(4, 3, seed=2), normal(4, 2, seed=3)


class ModelOutput(OrderedDict):
    """What Hugging Face models return: an ordered mapping that also takes positions."""

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


def expected():
    return SquaredError()(NEW, OLD)


def test_independent_heads_are_added():
    both = expected() + SquaredError()(OTHER, 2 * OTHER)
    torch.testing.assert_close(SquaredError()((NEW, OTHER), (OLD, 2 * OTHER)), both)
    torch.testing.assert_close(SquaredError()([NEW, {"x": OTHER}], [OLD, {"x": 2 * OTHER}]), both)


def test_logits_of_a_mapping_are_preferred_to_its_other_entries():
    new = ModelOutput(loss=OTHER.sum(), logits=NEW, cache=object())
    old = ModelOutput(loss=OTHER.mean(), logits=OLD, cache=object())
    torch.testing.assert_close(SquaredError()(new, old), expected())


@pytest.mark.parametrize(
    ("output", "wrap"),
    [
        ("y", lambda z: {"y": z, "x": 3 * z}),
        ("y", lambda z: SimpleNamespace(y=z, x=3 * z)),
        (1, lambda z: (3 * z, z)),
        (1, lambda z: ModelOutput(x=3 * z, y=z)),
        (lambda outputs: outputs[0]["y"], lambda z: [{"y": z, "x": 3 * z}, 5 * z]),
    ],
)
def test_output_selects_by_name_position_or_function(output, wrap):
    torch.testing.assert_close(SquaredError(output=output)(wrap(NEW), wrap(OLD)), expected())


def test_integer_tensors_and_none_are_passed_over():
    lengths = torch.tensor([1, 2, 3, 4])
    torch.testing.assert_close(SquaredError()((NEW, lengths, None), (OLD, lengths, None)), expected())


def test_gaussian_pair_may_be_a_mapping():
    new, old = {"mean": NEW, "log_variance": OLD}, {"mean": OLD, "log_variance": NEW}
    torch.testing.assert_close(GaussianKL()(new, old), GaussianKL()((NEW, OLD), (OLD, NEW)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rho", [CategoricalKL(), BernoulliKL(), SquaredError(), GaussianKL(variance=1.0)])
def test_half_precision_is_compared_in_float32(rho, dtype):
    new, old = NEW.to(dtype).requires_grad_(), OLD.to(dtype)
    value = rho(new, old)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, rho(new.float(), old.float()))
    value.backward()
    assert new.grad is not None and new.grad.dtype == dtype


def test_float64_stays_float64():
    assert CategoricalKL()(NEW, OLD).dtype == torch.float64


def test_inputs_are_left_as_they_were():
    new, old = NEW.clone(), OLD.clone()
    CategoricalKL()(new, old, torch.tensor([True, False, True, True]))
    assert torch.equal(new, NEW) and torch.equal(old, OLD)
    assert not new.requires_grad and not old.requires_grad


@pytest.mark.parametrize(
    ("rho", "new", "old", "error", "message"),
    [
        (SquaredError(), NEW, NEW[:3], ValueError, r"got \(4, 3\) at the new.*\(3, 3\).*same FSD batch"),
        (SquaredError(), (NEW, NEW), (OLD,), ValueError, "the same outputs at both weights"),
        (
            SquaredError(),
            torch.ones(3).long(),
            torch.ones(3).long(),
            TypeError,
            r'int64.*=apo.CategoricalKL\(output="logits"\)',
        ),
        (SquaredError(), {"x": None}, {"x": None}, TypeError, "must return a floating-point tensor"),
        (SquaredError(), (NEW, "text"), (OLD, "text"), TypeError, r"output\[1\] must be a tensor .*got .*str"),
        (
            SquaredError(output="y"),
            {"x": NEW},
            {"x": OLD},
            ValueError,
            r"output must name one of .*\{x: float64.*, got 'y'",
        ),
        (SquaredError(output=2), (NEW,), (OLD,), ValueError, "got 2: pass a key"),
        (SquaredError(output="y"), NEW, OLD, ValueError, "got 'y': pass a key"),
        (CategoricalKL(dim=2), NEW, OLD, ValueError, r"must be a dimension of outputs of shape \(4, 3\), got 2"),
        (CategoricalKL(), NEW.sum(), OLD.sum(), ValueError, r"of shape \(\), got -1"),
        (
            CategoricalKL(),
            NEW[:, :1],
            OLD[:, :1],
            ValueError,
            r'two classes, .*: pass discrepancy=apo.SquaredError\("mean"\) for a regression, apo.BernoulliKL',
        ),
        (GaussianKL(), NEW, OLD, TypeError, r"outputs must be \(mean, log_variance\).*variance="),
        (GaussianKL(), (NEW, OTHER.long()), (OLD, OTHER.long()), TypeError, "mean, log_variance"),
    ],
)
def test_outputs_that_do_not_fit_are_refused_in_one_sentence(rho, new, old, error, message):
    with pytest.raises(error, match=message):
        rho(new, old)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: SquaredError("none"), ValueError, "reduction must be"),  # type: ignore[arg-type]
        (lambda: BernoulliKL("max"), ValueError, "reduction must be"),  # type: ignore[arg-type]
        (lambda: GaussianKL(variance=-1.0), ValueError, "variance must be positive"),
        (lambda: CategoricalKL(dim="last"), ValueError, "dim must be"),  # type: ignore[arg-type]
        (lambda: SquaredError(output=1.5), TypeError, "output must be a name"),  # type: ignore[arg-type]
    ],
)
def test_wrong_constructor_arguments_are_refused(build, error, message):
    with pytest.raises(error, match=message):
        build()
