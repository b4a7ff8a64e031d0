"""Figure 1: what each discrepancy does to an exact proximal update on a single example of a 1-D regression.

WSD alone fits the example by changing the function everywhere; FSD alone carves a spike that leaves even close
inputs unimproved; both together change the function locally.
"""

import pytest
import torch

from apo.reference import one_dimensional_regression

WSD_ONLY, FSD_ONLY, BOTH = range(3)


@pytest.fixture(scope="module")
def curves():
    return one_dimensional_regression([(0.0, 0.1), (1.0, 0.0), (1.0, 0.1)])


def change(curves, which, low, high):
    """Mean change of the prediction at distance low to high from the new example."""
    distance = (curves.grid - curves.example[0]).abs()
    return (curves.new[which] - curves.old)[(distance >= low) & (distance <= high)].mean().item()


def movement(curves, which, low, high):
    distance = (curves.grid - curves.example[0]).abs()
    return (curves.new[which] - curves.old)[(distance >= low) & (distance <= high)].square().mean().sqrt().item()


def half_width(curves, which):
    """Width of the region where the change exceeds half its largest value."""
    moved = (curves.new[which] - curves.old).abs()
    return 6 * (moved > moved.max() / 2).double().mean().item()


def test_the_network_fits_its_data_before_the_update(curves):
    step = torch.searchsorted(curves.grid, curves.data_inputs.clamp(max=2.999))
    assert (curves.old[step] - curves.data_targets).abs().max() < 0.1


@pytest.mark.parametrize("which", [WSD_ONLY, FSD_ONLY, BOTH])
def test_every_update_improves_the_fit_at_the_example(curves, which):
    gap = curves.example[1] - curves.old_at_example
    assert abs(curves.example[1] - curves.at_example[which].item()) < 0.2 * gap


def test_wsd_alone_overwrites_predictions_everywhere(curves):
    gap = curves.example[1] - curves.old_at_example
    assert movement(curves, WSD_ONLY, 1.2, 3) > 0.3 * gap
    assert half_width(curves, WSD_ONLY) > 2


def test_fsd_keeps_distant_predictions(curves):
    for which in (FSD_ONLY, BOTH):
        assert movement(curves, which, 1.2, 3) < movement(curves, WSD_ONLY, 1.2, 3) / 20


def test_fsd_alone_carves_a_spike(curves):
    gap = curves.example[1] - curves.old_at_example
    assert half_width(curves, FSD_ONLY) < 0.3
    assert change(curves, FSD_ONLY, 0.2, 0.5) < 0.1 * gap


def test_both_together_change_the_function_locally(curves):
    gap = curves.example[1] - curves.old_at_example
    assert half_width(curves, FSD_ONLY) < half_width(curves, BOTH) < half_width(curves, WSD_ONLY) / 2
    assert change(curves, BOTH, 0.2, 0.5) > 0.25 * gap


def test_a_larger_weight_means_a_smaller_update():
    found = one_dimensional_regression([(0.0, 0.1), (0.0, 10.0), (0.0, 1000.0)])
    gaps = (found.example[1] - found.at_example).tolist()
    assert gaps[0] < gaps[1] < gaps[2] < found.example[1] - found.old_at_example
