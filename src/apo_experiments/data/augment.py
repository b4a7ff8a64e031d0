"""Random crops and flips of many images at once, on their device, and their normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

#: The paper pads with 4 pixels on each side (appendix B).
PADDING = 4


def crop_and_flip(images: Tensor, offsets: Tensor, flips: Tensor, padding: int = PADDING) -> Tensor:
    r"""Pad each image with zeros, crop it to the old size at its own offset, and mirror it if its flip is set.

    With :math:`P` the padded image, :math:`(r, c)` the offset and :math:`W` the width,

    .. math:: Y_{ij} = P_{r + i,\; c + j} \quad\text{or, mirrored,}\quad Y_{ij} = P_{r + i,\; c + W - 1 - j}.

    The usual pipeline does this for one image at a time on the CPU, before normalization: the padding is black, not
    grey. One gather does it for all images, without waiting for the host.

    Args:
        images: ``[B, C, H, W]``, any type.
        offsets: ``[B, 2]``, int64, row and column of the window in the padded image, from 0 to ``2 * padding``.
        flips: ``[B]``, bool.
        padding: Pixels on each side.

    Returns:
        ``[B, C, H, W]``, of the same type.
    """
    count, channels, height, width = images.shape
    device = images.device
    padded = F.pad(images, (padding,) * 4)
    rows = offsets[:, :1] + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(count, width)
    columns = offsets[:, 1:] + torch.where(flips[:, None], width - 1 - columns, columns)
    image = torch.arange(count, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


@final
class Normalization:
    r"""Bytes to numbers: :math:`(x / 255 - \text{mean}) / \text{std}` by channel, as one product and one sum.

    It is computed in at least float32, whatever the type of the result.

    Args:
        mean: Of each channel, with pixels in [0, 1]; None for zero.
        std: Of each channel; None for one.
        dtype: Of the result.
        device: Device of the images.
    """

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        means = torch.tensor([0.0] if mean is None else list(mean), dtype=torch.float64)
        stds = torch.tensor([1.0] if std is None else list(std), dtype=torch.float64)
        if not bool((stds > 0).all()):
            raise ValueError(f"std must be positive, got {stds.tolist()}")
        wide = torch.promote_types(dtype, torch.float32)
        self._dtype = dtype
        self._scale = (1 / (255 * stds)).to(wide)[:, None, None].to(device)
        self._shift = (-means / stds).to(wide)[:, None, None].to(device)

    def __call__(self, images: Tensor) -> Tensor:
        """Normalize images ``[B, C, H, W]`` of bytes; the result is a new tensor."""
        return (images * self._scale).add_(self._shift).to(self._dtype)
