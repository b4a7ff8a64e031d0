from __future__ import annotations

import numpy as np
import pytest
import torch

from apo_experiments.data.augment import PADDING, Normalization, crop_and_flip


def usual_pipeline(image: np.ndarray, row: int, column: int, flip: bool, padding: int) -> np.ndarray:
    """One image at a time: pad the bytes with zeros, crop, mirror the crop."""
    channels, height, width = image.shape
    padded = np.zeros((channels, height + 2 * padding, width + 2 * padding), image.dtype)
    padded[:, padding : padding + height, padding : padding + width] = image
    crop = padded[:, row : row + height, column : column + width]
    return crop[:, :, ::-1] if flip else crop


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 7, 5)])
@pytest.mark.parametrize("padding", [PADDING, 1])
def test_crop_and_flip_equals_the_usual_pipeline_pixel_for_pixel(shape: tuple[int, ...], padding: int) -> None:
    generator = torch.Generator().manual_seed(0)
    size = 2 * padding + 1
    # Every offset, mirrored and not.
    grid = torch.cartesian_prod(torch.arange(size), torch.arange(size), torch.arange(2))
    offsets, flips = grid[:, :2], grid[:, 2].bool()
    images = torch.randint(0, 256, (len(grid), *shape), generator=generator, dtype=torch.uint8)
    result = crop_and_flip(images, offsets, flips, padding)
    assert result.dtype == torch.uint8 and result.shape == images.shape
    for image, (row, column, flip), found in zip(images.numpy(), grid.tolist(), result.numpy(), strict=True):
        np.testing.assert_array_equal(found, usual_pipeline(image, row, column, bool(flip), padding))


def test_the_centre_window_is_the_image_itself() -> None:
    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    centre = torch.full((5, 2), PADDING)
    assert torch.equal(crop_and_flip(images, centre, torch.zeros(5, dtype=torch.bool)), images)


def test_normalization_equals_its_definition() -> None:
    images = torch.randint(0, 256, (4, 3, 6, 6), dtype=torch.uint8)
    mean, std = [0.49, 0.48, 0.45], [0.25, 0.24, 0.26]
    column = [torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (mean, std)]
    exact = (images.double() / 255 - column[0]) / column[1]
    torch.testing.assert_close(Normalization(mean, std)(images).double(), exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(Normalization(mean, std, torch.float64)(images), exact, rtol=0, atol=1e-13)
    # 16 bit: rounded once, at the end.
    half = Normalization(mean, std, torch.bfloat16)(images)
    assert torch.equal(half, Normalization(mean, std)(images).to(torch.bfloat16))
    assert torch.equal(Normalization()(images), images * torch.tensor(1 / 255))


def test_a_deviation_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="std must be positive, got"):
        Normalization([0.5], [0.0])
